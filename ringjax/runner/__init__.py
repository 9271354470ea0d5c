"""Makes the function `run` importable from Horovod's module path `runner`."""

from ringjax.run.horovod_arguments import run

__all__ = ["run"]
