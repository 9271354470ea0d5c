"""Horovod's place for the driver's address; only hands it on."""

from ringjax.run.horovod_arguments import get_driver_ip

__all__ = ["get_driver_ip"]
