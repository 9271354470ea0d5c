"""Makes `HorovodBasics` importable from the module path that Horovod uses."""

from ringjax.horovod.basics import HorovodBasics

__all__ = ["HorovodBasics"]
