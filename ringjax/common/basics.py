"""Horovod's place for its basics; only hands them on."""

from ringjax.horovod.basics import HorovodBasics

__all__ = ["HorovodBasics"]
