"""Horovod's place for what says which hosts there are; only hands it on."""

from ringjax.ray.discovery import HostDiscovery

__all__ = ["HostDiscovery"]
