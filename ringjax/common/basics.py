"""Horovod's place for its basics; only hands them on."""

from ringjax.horovod_basics import HorovodBasics

__all__ = ["HorovodBasics"]
