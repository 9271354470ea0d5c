"""Fixtures that several files of this folder share."""

from support.coordinators import town
from support.ringrun import ssh

__all__ = ["ssh", "town"]
