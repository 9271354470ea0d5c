"""The functions that JAX and jaxlib call in programs that may not import ringjax.

JAX imports this module in every program of an environment that has ringjax, so it
imports no other module unless the program asks for it.
"""

from __future__ import annotations

import os


def initialize() -> None:
    """Runs JAX's own collectives on ringjax if the settings want it.

    The entry point in the group `jax_plugins`: JAX calls it before its first client.
    """
    if _may_want_ringjax():
        from ringjax.xla import jax_collectives

        jax_collectives.enable()


def add_cluster() -> None:
    """Lets `jax.distributed.initialize()` find the processes of a job of ringrun.

    `import ringjax` calls it, and libringjax_mpi.so when jaxlib is imported.
    """
    if "RINGJAX_SIZE" in os.environ or _may_want_ringjax():
        from ringjax.xla import jax_cluster

        jax_cluster.watch()


def _may_want_ringjax() -> bool:
    if not {"RINGJAX_JAX_COLLECTIVES", "RINGJAX_GROUP_SIZE"}.intersection(os.environ):
        return False
    from ringjax.settings import mpi_library

    return mpi_library.is_wanted(os.environ)
