"""Horovod's questions about what was compiled in, answered for scripts that ask them.

ringjax has no MPI, Gloo, DDL or oneCCL, and needs no CUDA at build time; its own
transports are always there.
"""

from __future__ import annotations

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """False: MPI is not used; a job may still be started with mpirun."""
    return False


def mpi_enabled() -> bool:
    """False, see `mpi_built`."""
    return False


def mpi_threads_supported() -> bool:
    """False, see `mpi_built`."""
    return False


def gloo_built() -> bool:
    """False: ringjax brings its own transports."""
    return False


def gloo_enabled() -> bool:
    """False, see `gloo_built`."""
    return False


def nccl_built() -> int:
    """0: nothing is linked against NCCL (Horovod: its version, 0 without it)."""
    return 0


def cuda_built() -> bool:
    """False: no CUDA is needed to build."""
    return False


def rocm_built() -> bool:
    """False."""
    return False


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False
