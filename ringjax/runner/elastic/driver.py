"""Horovod's place for how often a discovery is asked; only hands it on."""

from ringjax.ray.discovery import DISCOVER_HOSTS_FREQUENCY_SECS

__all__ = ["DISCOVER_HOSTS_FREQUENCY_SECS"]
