"""Makes the function `get_driver_ip` importable from Horovod's module path."""

from ringjax.run.horovod_arguments import get_driver_ip

__all__ = ["get_driver_ip"]
