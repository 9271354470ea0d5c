"""The peers there are: by which adapter, what each needs, and who starts its ranks.

How they are started: harness/launchers.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.adapter import Peer
from benchmarks.peers.horovod import Horovod, RingjaxTorch
from benchmarks.peers.jax_gloo import JaxGloo
from benchmarks.peers.limit import Limit
from benchmarks.peers.mpi4jax import Mpi4jax
from benchmarks.peers.mpi4py import Mpi4py
from benchmarks.peers.ringjax import JaxEmpty, Ringjax, RingjaxTcp
from benchmarks.peers.shards import JaxShards, RingjaxShards
from benchmarks.peers.torch_gloo import TorchGloo


@dataclass(frozen=True)
class Entry:
    """One peer.

    Attributes:
      kind: its adapter.
      modules: without these there is no such peer.
      launcher: who starts its ranks: "ringrun", "mpirun", "mpich", "horovodrun", or ""
        for nobody; they are then told their rank.
    """

    kind: type[Peer]
    modules: tuple[str, ...]
    launcher: str = ""


# By the names of the command line.
PEERS = {
    "limit": Entry(Limit, ()),
    "ringjax": Entry(Ringjax, ("ringjax",), "ringrun"),
    "ringjax-tcp": Entry(RingjaxTcp, ("ringjax",), "ringrun"),
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
# What the others are held against where there is no limit.
MPI = ("mpi4py", "mpich")
