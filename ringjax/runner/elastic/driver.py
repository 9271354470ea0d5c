"""Makes the interval of host discovery importable from Horovod's module path."""

from ringjax.ray.discovery import DISCOVER_HOSTS_FREQUENCY_SECS

__all__ = ["DISCOVER_HOSTS_FREQUENCY_SECS"]
