"""Horovod's functions about the features of a build, and `build_info` for bug reports.

ringjax has no MPI, DDL or oneCCL, and transports of its own in place of Gloo, which is
Horovod's transport on CPUs. NCCL and the CUDA driver are loaded at run time, so the
results for one build may differ from machine to machine.
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
    """Returns False: ringjax does not use MPI, even in jobs that mpirun has started."""
    return False


def mpi_enabled() -> bool:
    """Returns False, because ringjax does not use MPI."""
    return False


def mpi_threads_supported() -> bool:
    """Returns False, because ringjax does not use MPI."""
    return False


def gloo_built() -> bool:
    """Returns True, because ringjax's own transports replace Gloo.

    Example:
        >>> assert mpi_built() or gloo_built()  # many programs for Horovod begin so
    """
    return True


def gloo_enabled() -> bool:
    """Returns True, because ringjax's own transports replace Gloo."""
    return True


def nccl_built() -> int:
    """Returns the version of NCCL, 22809 for 2.28.9; 0 if NCCL cannot be loaded."""
    try:
        return devices.open_library(config.Config.from_env().nccl)[0]
    except RingjaxError:
        return 0


def cuda_built() -> bool:
    """Returns whether this build contains code for CUDA devices, even without a GPU."""
    return bool(devices.information()["device_code"] != "none")


def rocm_built() -> bool:
    """Returns False, because ringjax does not use ROCm."""
    return False


def sycl_built() -> bool:
    """Returns False, because ringjax does not use SYCL."""
    return False


def ddl_built() -> bool:
    """Returns False, because ringjax does not use IBM DDL."""
    return False


def ccl_built() -> bool:
    """Returns False, because ringjax does not use oneCCL."""
    return False


def build_info() -> dict[str, Any]:
    """Returns what this build contains and what it finds on this machine.

    Loads NCCL and the CUDA driver if this machine has them. Uses no device.

    Returns:
        A dict with these keys:

        - ``ringjax``: the version.
        - ``device_code``: the compiler of the code for CUDA devices, or "none".
        - ``images``: the parts of that code, as (kind, architecture, bytes).
        - ``driver``: the newest CUDA version that the driver supports, 13000 for 13.0;
          0 if there is no driver, and ``driver_error`` says why.
        - ``devices``: name, uuid and compute capability of each device.
        - ``nccl``: the version, 22809 for 2.28.9; 0 if NCCL cannot be loaded, and
          ``nccl_error`` says why.
        - ``nccl_path``: the file of NCCL that is loaded.

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
