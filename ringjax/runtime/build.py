"""Horovod's questions about what was compiled in, and `build_info` for people.

ringjax has no MPI, DDL or oneCCL. Its own transports are always there, and are what
programs mean that ask for Gloo: the built-in CPU plane. NCCL and the CUDA
driver are not linked but opened at run time, so these answers may differ from one
machine to the next with the same build.
"""

from __future__ import annotations

from typing import Any

from ringjax import config
from ringjax.errors import RingjaxError
from ringjax.settings.version import version
from ringjax.world import devices

__all__ = [
    "build_info",
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
    "sycl_built",
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
    """True: the built-in CPU plane, which is Gloo in Horovod and ringjax's own here.

    Example:
        >>> assert mpi_built() or gloo_built()  # as programs for Horovod begin
    """
    return True


def gloo_enabled() -> bool:
    """True, see `gloo_built`."""
    return True


def nccl_built() -> int:
    """The version of NCCL as a number, 22809 for 2.28.9; 0 if none can be loaded."""
    try:
        return devices.open_library(config.Config.from_env().nccl)[0]
    except RingjaxError:
        return 0


def cuda_built() -> bool:
    """Whether this build has code for CUDA devices; true without a GPU as well."""
    return bool(devices.information()["device_code"] != "none")


def rocm_built() -> bool:
    """False."""
    return False


def sycl_built() -> bool:
    """False."""
    return False


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def build_info() -> dict[str, Any]:
    """What this build has and what it finds on this machine, for reports and bugs.

    Loads NCCL and the CUDA driver if they are there; uses no device.

    Returns:
        ``ringjax``: its version. ``device_code``: which compiler made the code for CUDA
        devices, or "none". ``images``: its pieces, (kind, architecture, bytes).
        ``driver``: the newest CUDA version that the driver knows, 13000 for 13.0, or 0,
        and then ``driver_error`` says why. ``devices``: name, uuid and compute
        capability of each. ``nccl``: its version, 22809 for 2.28.9, or 0, and then
        ``nccl_error`` says why. ``nccl_path``: the file that is loaded.

    Example:
        >>> info = build_info()
        >>> info["driver"] > 0 or bool(info["driver_error"])
        True
    """
    found: dict[str, Any] = {"ringjax": version(), **devices.information()}
    found["nccl_error"] = ""
    try:
        opened = devices.open_library(config.Config.from_env().nccl)
        found["nccl"], found["nccl_path"] = opened
    except RingjaxError as error:
        found["nccl"], found["nccl_path"], found["nccl_error"] = 0, "", str(error)
    return found
