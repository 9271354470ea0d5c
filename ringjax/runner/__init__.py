"""Horovod's module path of `run`; it only imports the function."""

from ringjax.run.horovod_arguments import run

__all__ = ["run"]
