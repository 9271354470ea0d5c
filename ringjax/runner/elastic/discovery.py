"""Makes the class `HostDiscovery` importable from Horovod's module path."""

from ringjax.ray.discovery import HostDiscovery

__all__ = ["HostDiscovery"]
