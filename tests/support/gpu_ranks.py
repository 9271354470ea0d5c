"""The environment of ranks that share one GPU, for tests/gpu.

NCCL refuses two ranks of one host on one device. NCCL takes the name of the host from
NCCL_HOSTID, so each rank gets its own NCCL_HOSTID. Then all data travel over sockets of
this machine and the ranks take turns on the device, so these tests check results but
not speed. RINGJAX_TEST_DEVICE=cpu runs these tests on the CPU, which proves that the
tests run, and nothing about GPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

VARIABLE = "RINGJAX_TEST_DEVICE"
ON_CPU = os.environ.get(VARIABLE) == "cpu"
PROGRAMS = Path(__file__).resolve().parents[1] / "gpu" / "programs"
# The checkout is the last entry of sys.path, because the ringjax under test must be the
# installed package.
sys.path.append(str(PROGRAMS.parents[2]))

_DEFAULTS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_RAS_ENABLE": "0",
    # The ranks of a call take several turns on the device; with Ring and Simple, the
    # fewest.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    # Lazy loading of a kernel may wait for all running kernels, which are kernels of
    # other ranks that wait for this rank.
    "CUDA_MODULE_LOADING": "EAGER",
    "JAX_ENABLE_X64": "1",
    # TF32 would turn a difference in the last bit into a difference in the 11th bit.
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
}
# Tests compare results bit for bit, so XLA must not choose algorithms by their speed.
_XLA_FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def environment(
    environ: MutableMapping[str, str] = os.environ, on_cpu: bool = ON_CPU
) -> dict[str, str]:
    """Returns the variables of a job. The user's values have priority over defaults."""
    return {
        **{name: environ.get(name, value) for name, value in _DEFAULTS.items()},
        VARIABLE: "cpu" if on_cpu else "cuda",
        "JAX_PLATFORMS": "cpu" if on_cpu else "cuda",
        "XLA_FLAGS": f"{environ.get('XLA_FLAGS', '')} {_XLA_FLAGS}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "CUDA_VISIBLE_DEVICES": environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        # Short enough for a test, and long enough for ranks that take turns.
        "RINGJAX_COLLECTIVE_TIMEOUT": "40",
        "RINGJAX_START_TIMEOUT": "60",
    }


def separate_host(rank: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes NCCL treat this rank as a separate host. Call before `ringjax.init`."""
    environ["NCCL_HOSTID"] = f"ringjax-test-{rank}"
    for name in _FRACTIONS:  # jaxlib refuses both names at once; the tests need neither
        environ.pop(name, None)


def visible_devices(count: int, rank: int, ranks: int = 2) -> str:
    """Returns the devices of a rank. Ranks share devices if there are too few.

    Example:
        >>> visible_devices(8, 1), visible_devices(3, 1)
        ('4,5,6,7', '0,1')
    """
    enough = count >= 2 * ranks
    each = count // ranks if enough else 2
    first = rank * each if enough else 0
    return ",".join(str(n) for n in range(first, first + each))


def separate_host_of_job() -> int:
    """Calls `separate_host` with the number of this rank or worker; returns it."""
    number = int(os.environ.get("RINGJAX_WORKER") or os.environ["RINGJAX_RANK"])
    separate_host(number)
    return number


def uses_nccl() -> bool:
    """Returns whether ringjax sends JAX's arrays of this rank by NCCL."""
    from benchmarks.gpu.section import device_communicator

    return device_communicator() is not None


def digest(tree: Any) -> str:
    """Returns a hash of all bits of a JAX tree of arrays."""
    import hashlib

    import jax

    found = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(tree)):
        found.update(leaf.tobytes())
    return found.hexdigest()
