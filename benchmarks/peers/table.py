"""The peers there are: by which adapter, what each needs, and who starts its ranks.

The adapters are in limit.py, jax_peers.py, torch_peers.py and here; how they are
started, in launchers.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.peers.adapter import Operation, Peer, Shapes
from benchmarks.peers.jax_peers import JaxEmpty, JaxGloo, Mpi4jax, Ringjax, RingjaxTcp
from benchmarks.peers.limit import Limit
from benchmarks.peers.torch_peers import Horovod, RingjaxTorch, TorchGloo


class Mpi4py(Peer):
    """An MPI through mpi4py, in place on numpy arrays."""

    arrays = ("Allreduce in place",)
    models = ("Allreduce in place, one by one",)
    dtypes = ("float32",)  # MPI has no bfloat16

    def __init__(self, rank: int, size: int, port: int) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        self.version = " ".join(
            MPI.Get_library_version().split(",")[0].split("\n")[0].split()
        )

    def total(self, value: float) -> float:
        """Adds `value` of all ranks."""
        return float(self._world.allreduce(value))

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        """Makes the blocking function."""
        arrays = [np.zeros(s, dtype) for s in shapes]
        averages = variant in self.models

        def step() -> None:
            for array in arrays:
                self._world.Allreduce(self._mpi.IN_PLACE, array)
                if averages:
                    array /= self.size

        return step

    def close(self) -> None:
        """Leaves the world."""
        self._mpi.Finalize()


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
    "torch-gloo": Entry(TorchGloo, ("torch",)),
    "ringjax-torch": Entry(RingjaxTorch, ("ringjax", "torch"), "ringrun"),
    "horovod": Entry(Horovod, ("horovod", "torch"), "horovodrun"),
    "mpi4py": Entry(Mpi4py, ("mpi4py",), "mpirun"),
    "mpich": Entry(Mpi4py, ("mpi4py",), "mpich"),
    "mpi4jax": Entry(Mpi4jax, ("mpi4jax", "mpi4py"), "mpirun"),
}
