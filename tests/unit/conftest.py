"""Fixtures that several files of this folder share."""

from support.coordinators import make_job
from support.ringrun import ssh

__all__ = ["make_job", "ssh"]
