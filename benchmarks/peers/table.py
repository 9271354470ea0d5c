"""The peers there are: by which adapter, what each needs, and who starts its ranks.

How they are started: harness/launchers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.adapter import Peer
from benchmarks.peers.horovod import Horovod, RingjaxTorch
from benchmarks.peers.jax_gloo import JaxGloo
from benchmarks.peers.keras import RingjaxKeras
from benchmarks.peers.limit import Limit
from benchmarks.peers.mpi4jax import Mpi4jax
from benchmarks.peers.mpi4py import Mpi4py
from benchmarks.peers.ringjax import JaxEmpty, Ringjax, RingjaxTcp
from benchmarks.peers.shards import JaxShards, RingjaxShards
from benchmarks.peers.tensorflow import RingjaxTensorflow
from benchmarks.peers.torch_gloo import TorchGloo


@dataclass(frozen=True)
class Entry:
    """One peer.

    Attributes:
      kind: its adapter.
      modules: without these there is no such peer.
      launcher: who starts its ranks: "ringrun", "mpirun", "mpich", "horovodrun", or ""
        for nobody; they are then told their rank.
      options: of ringrun.
      environment: more variables for ringrun.
      usual: whether a comparison has it without being asked.
    """

    kind: type[Peer]
    modules: tuple[str, ...]
    launcher: str = ""
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    usual: bool = True


def _ours(kind: type[Peer], *modules: str, **more: Any) -> Entry:
    """A peer of ringjax's own, which is compared only where somebody asks for it."""
    return Entry(kind, ("ringjax", *modules), "ringrun", usual=False, **more)


def _keras(backend: str) -> Entry:
    variable = {"KERAS_BACKEND": backend}
    return _ours(RingjaxKeras, "keras", backend, environment=variable)


# By the names of the command line.
PEERS = {
    "limit": Entry(Limit, ()),
    "ringjax": Entry(Ringjax, ("ringjax",), "ringrun"),
    "ringjax-tcp": Entry(
        RingjaxTcp, ("ringjax",), "ringrun", environment={"RINGJAX_SHM": "0"}
    ),
    "ringjax-tls": _ours(
        RingjaxTcp, environment={"RINGJAX_SHM": "0", "RINGJAX_TLS": "required"}
    ),
    "ringjax-elastic": _ours(Ringjax, options=("--min-np", "1")),
    "ringjax-tensorflow": _ours(RingjaxTensorflow, "tensorflow"),
    **{f"keras-{name}": _keras(name) for name in ("jax", "torch", "tensorflow")},
    "jax-empty": Entry(JaxEmpty, ("ringjax",), "ringrun"),
    "jax-gloo": Entry(JaxGloo, ("jax",)),
    "ringjax-shards": Entry(RingjaxShards, ("ringjax",), "ringrun"),
    "jax-shards": Entry(JaxShards, ("jax",)),
    "torch-gloo": Entry(TorchGloo, ("torch",)),
    "ringjax-torch": Entry(RingjaxTorch, ("ringjax", "torch"), "ringrun"),
    "horovod": Entry(Horovod, ("horovod", "torch"), "horovodrun"),
    "mpi4py": Entry(Mpi4py, ("mpi4py",), "mpirun"),
    "mpich": Entry(Mpi4py, ("mpi4py",), "mpich"),
    "mpi4jax": Entry(Mpi4jax, ("mpi4jax", "mpi4py"), "mpirun"),
}
# The peers with which the others are compared if there is no limit.
MPI = ("mpi4py", "mpich")
