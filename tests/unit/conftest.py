"""Fixtures that several files of this folder share."""

from support.coordinators import town

__all__ = ["town"]
