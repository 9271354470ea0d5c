"""Horovod's module path of `HorovodBasics`; it only imports the class."""

from ringjax.horovod.basics import HorovodBasics

__all__ = ["HorovodBasics"]
