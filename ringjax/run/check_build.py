"""`ringrun --check-build`: shows which frameworks and transports can be used here.

This module finds packages and libraries without loading them. It loads only the native
core, which reports its CUDA architectures and the devices that the driver finds.
"""

from __future__ import annotations

import glob
import os
import platform
import sys
from importlib import metadata, util
from typing import Any

from ringjax.run import environ
from ringjax.settings.version import version


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _found(name: str) -> bool:
    try:
        return util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _line(mark: bool, text: str) -> str:
    return f"    [{'X' if mark else ' '}] {text}\n"


def _package(module: str, distribution: str, title: str) -> str:
    if not _found(module):
        return _line(False, title)
    return _line(True, f"{title} {installed_version(distribution) or ''}".rstrip())


def _adapter(module: str, title: str) -> str:
    """Returns the line about a framework for which ringjax has an adapter."""
    if not _found(f"ringjax.{module}"):
        return _line(False, title)
    return _package(module, module, title).replace("\n", f" (ringjax.{module})\n")


def library(pattern: str, packages: str) -> str | None:
    """Returns the path of a shared library in a pip package or a system folder.

    `pattern` is the file name with wildcards. `packages` is the folder of the pip
    package in site-packages.
    """
    roots = [
        *(os.path.join(p, packages) for p in sys.path if p.endswith("-packages")),
        *environ.library_paths(),
        "/usr/local/cuda/lib64",
        "/usr/local/cuda/compat",
        f"/usr/lib/{platform.machine()}-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
    ]
    for root in filter(None, roots):
        if matches := sorted(glob.glob(os.path.join(root, pattern))):
            return matches[0]
    return None


def cuda_info() -> dict[str, Any]:
    try:
        from ringjax import _native
    except ImportError as error:
        return {"device_code": "none", "devices": [], "driver_error": str(error)}
    return _native.cuda_info()


def _devices(cuda: dict[str, Any]) -> str:
    code, devices = cuda["device_code"], cuda["devices"]
    capabilities = ", ".join(
        f"{d['name']} ({d['compute_capability']})" for d in devices
    )
    return _line(code != "none", f"code for CUDA devices ({code})") + _line(
        bool(devices), f"CUDA devices: {capabilities or cuda['driver_error'] or 'none'}"
    )


def report() -> str:
    nccl = library("libnccl.so*", "nvidia/nccl/lib")
    driver = library("libcuda.so*", "")
    ofi = library("libfabric.so.1", "")
    core = _found("ringjax._native")
    memfd = hasattr(os, "memfd_create")
    return (
        f"ringjax v{version()}:\n\n"
        "Available Frameworks:\n"
        + _package("jax", "jax", "JAX")
        + _package("jaxlib", "jaxlib", "jaxlib")
        + _package("optax", "optax", "Optax")
        + _package("flax", "flax", "Flax")
        + _adapter("tensorflow", "TensorFlow")
        + _adapter("keras", "Keras")
        + _adapter("torch", "PyTorch")
        + _adapter("mxnet", "MXNet")
        + "\nAvailable Transports:\n"
        + _line(core, "native core (ringjax._native)")
        + _line(core and memfd, "shared memory (memfd)")
        + _line(core, "TCP")
        + "\nAvailable Libraries:\n"
        + _line(nccl is not None, f"NCCL {nccl or '(not found)'}")
        + _line(driver is not None, f"CUDA driver {driver or '(not found)'}")
        + _line(ofi is not None, f"libfabric {ofi or '(not found)'}")
        + "\nCUDA Devices:\n"
        + _devices(cuda_info())
    )
