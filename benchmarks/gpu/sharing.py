"""Several ranks on one GPU: the environment that makes NCCL and JAX agree to it.

To be applied before libnccl and jax are imported. NCCL refuses two ranks on one device
of one host, and takes NCCL_HOSTID for the name of the host; then everything travels
over sockets of this machine. For correctness only: the ranks take turns on the device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_RAS_ENABLE": "0",
    # The time of a call is a number of turns on the device: fewer with these.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    # A kernel that is loaded late may wait for all that runs, and so for other ranks.
    "CUDA_MODULE_LOADING": "EAGER",
}
# Results that are compared bit for bit must not depend on which algorithm was faster.
_XLA = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def prepare(
    rank: int,
    visible: str | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Changes the environment of this rank's process.

    Args:
      rank: its number.
      visible: the devices that it sees; None: the first one that this process does.
      environ: what to change.
    """
    if "jax" in sys.modules and environ is os.environ:
        raise RuntimeError("too late: jax is imported already")
    environ["NCCL_HOSTID"] = f"ringjax-check-{rank}"
    for name, value in NCCL.items():
        environ.setdefault(name, value)
    for name in _FRACTIONS:  # jaxlib refuses both at once; neither is needed here
        environ.pop(name, None)
    environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if visible is None:
        visible = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environ["CUDA_VISIBLE_DEVICES"] = visible
    environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {_XLA}".strip()
    environ.setdefault("JAX_ENABLE_X64", "1")
    # TF32 would turn a difference in the last bit into one in the eleventh.
    environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    # Soon enough for a check, late enough for ranks that take turns.
    environ.setdefault("RINGJAX_COLLECTIVE_TIMEOUT", "40")
    environ.setdefault("RINGJAX_START_TIMEOUT", "60")
