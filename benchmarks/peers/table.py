"""The table of all peers: adapters, requirements, and launchers.

harness/launchers.py starts the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.adapter import Peer
from benchmarks.peers.horovod import Horovod, RingjaxTorch
from benchmarks.peers.jax_gloo import JaxGloo, JaxOnRingjax
from benchmarks.peers.keras import RingjaxKeras
from benchmarks.peers.limit import Limit
from benchmarks.peers.mpi4jax import Mpi4jax
from benchmarks.peers.mpi4py import Mpi4py
from benchmarks.peers.oneccl import OneCcl
from benchmarks.peers.ringjax import JaxEmpty, Ringjax, RingjaxTcp
from benchmarks.peers.shards import JaxShards, RingjaxShards
from benchmarks.peers.tensorflow import RingjaxTensorflow
from benchmarks.peers.torch_gloo import TorchGloo
from ringjax.run import environ
from ringjax.settings import mpi_library


@dataclass(frozen=True)
class Entry:
    """One peer.

    Attributes:
      kind: the adapter of the peer.
      modules: the modules that the peer needs.
      launcher: the launcher: "ringrun", "mpirun", "mpich", "impi" or "horovodrun".
        If it is empty, the benchmark starts the ranks and sets the rank of each.
      options: options of ringrun.
      environment: additional variables.
      usual: whether comparisons contain the peer by default.
    """

    kind: type[Peer]
    modules: tuple[str, ...]
    launcher: str = ""
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    usual: bool = True


def _ours(kind: type[Peer], *modules: str, **more: Any) -> Entry:
    """Returns an entry for a variant of ringjax, which is compared only on request."""
    return Entry(kind, ("ringjax", *modules), "ringrun", usual=False, **more)


def _keras(backend: str) -> Entry:
    variable = {"KERAS_BACKEND": backend}
    return _ours(RingjaxKeras, "keras", backend, environment=variable)


def _collectives() -> dict[str, str]:
    """Returns the variables that `ringrun --jax-collectives` sets."""
    wanted = {mpi_library.SWITCH: "1"}
    return environ.rank_defaults() | wanted | mpi_library.variables(wanted)


# Peers by their names on the command line.
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
    "jax-ringjax": Entry(JaxOnRingjax, ("jax", "ringjax"), environment=_collectives()),
    "ringjax-shards": Entry(RingjaxShards, ("ringjax",), "ringrun"),
    "jax-shards": Entry(JaxShards, ("jax",)),
    "torch-gloo": Entry(TorchGloo, ("torch",)),
    "ringjax-torch": Entry(RingjaxTorch, ("ringjax", "torch"), "ringrun"),
    "horovod": Entry(Horovod, ("horovod", "torch"), "horovodrun"),
    "mpi4py": Entry(Mpi4py, ("mpi4py",), "mpirun"),
    "mpich": Entry(Mpi4py, ("mpi4py",), "mpich"),
    "impi": Entry(Mpi4py, ("mpi4py",), "impi"),
    # Otherwise each rank has a thread that spins, and waits for it.
    "oneccl": Entry(
        OneCcl, ("mpi4py",), "impi", environment={"CCL_WORKER_OFFLOAD": "0"}
    ),
    "mpi4jax": Entry(Mpi4jax, ("mpi4jax", "mpi4py"), "mpirun"),
}
# The peers with which the others are compared if there is no limit.
MPI = ("mpi4py", "mpich", "impi")
