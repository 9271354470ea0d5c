"""Fixtures that several files of this folder share."""

from support.elastic_job import start

__all__ = ["start"]
