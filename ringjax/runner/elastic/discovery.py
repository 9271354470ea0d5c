"""Horovod's module path of `HostDiscovery`; it only imports the class."""

from ringjax.ray.discovery import HostDiscovery

__all__ = ["HostDiscovery"]
