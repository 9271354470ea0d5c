"""Horovod's module path of `get_driver_ip`; it only imports the function."""

from ringjax.run.horovod_arguments import get_driver_ip

__all__ = ["get_driver_ip"]
