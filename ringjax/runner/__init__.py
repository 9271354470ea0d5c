"""Horovod's place for `run`; only hands it on."""

from ringjax.run.horovod_arguments import run

__all__ = ["run"]
