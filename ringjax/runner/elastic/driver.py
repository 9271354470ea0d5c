"""Horovod's module path of the interval of discoveries; it only imports it."""

from ringjax.ray.discovery import DISCOVER_HOSTS_FREQUENCY_SECS

__all__ = ["DISCOVER_HOSTS_FREQUENCY_SECS"]
