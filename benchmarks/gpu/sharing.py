"""Several ranks on one GPU: the environment with which NCCL and JAX allow this.

Apply this before libnccl and jax are imported. NCCL refuses two ranks on one device of
one host, but uses NCCL_HOSTID as the name of the host. Then all data travel over
sockets of this machine. The environment is only for checks of results, because the
ranks take turns on the device.
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
    # A call needs several turns on the device, and fewer turns with these variables.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    # A kernel that is loaded late may wait for all running kernels, and so for other
    # ranks.
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
      rank: the number of the rank.
      visible: the devices of the rank; by default the first device of this process.
      environ: the environment to change.
    """
    if "jax" in sys.modules and environ is os.environ:
        raise RuntimeError("too late: jax is imported already")
    environ["NCCL_HOSTID"] = f"ringjax-check-{rank}"
    for name, value in NCCL.items():
        environ.setdefault(name, value)
    for name in _FRACTIONS:  # jaxlib refuses two of these, and none is needed here
        environ.pop(name, None)
    environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if visible is None:
        visible = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environ["CUDA_VISIBLE_DEVICES"] = visible
    environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {_XLA}".strip()
    environ.setdefault("JAX_ENABLE_X64", "1")
    # TF32 would turn a difference in the last bit into a difference in the eleventh
    # bit.
    environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    # The timeout is short enough for a check, and long enough for ranks that take
    # turns.
    environ.setdefault("RINGJAX_COLLECTIVE_TIMEOUT", "40")
    environ.setdefault("RINGJAX_START_TIMEOUT", "60")
