"""Open MPI, MPICH and Intel MPI, through mpi4py."""

from __future__ import annotations

import numpy as np

from benchmarks.peers.adapter import COLLECTIVES, Array, Operation, Peer, Shapes


class Mpi4py(Peer):
    """An MPI through mpi4py, on existing numpy arrays."""

    arrays = ("Allreduce in place",)
    models = ("Allreduce in place, one by one",)
    dtypes = ("float32",)  # MPI has no bfloat16
    collectives = COLLECTIVES

    def __init__(self, rank: int, size: int, port: int) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        self.version = " ".join(
            MPI.Get_library_version().split(",")[0].split("\n")[0].split()
        )

    def total(self, value: float) -> float:
        return float(self._world.allreduce(value))

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        arrays = [np.zeros(s, dtype) for s in shapes]
        averages = variant in self.models

        def step() -> None:
            for array in arrays:
                self._world.Allreduce(self._mpi.IN_PLACE, array)
                if averages:
                    array /= self.size

        return step

    def collective(self, name: str, given: Array, out: Array) -> Operation:
        world, in_place = self._world, self._mpi.IN_PLACE
        return {
            "allreduce": lambda: world.Allreduce(in_place, out),
            "broadcast": lambda: world.Bcast(out, 0),
            "allgather": lambda: world.Allgather(given, out),
            "alltoall": lambda: world.Alltoall(given, out),
            "reducescatter": lambda: world.Reduce_scatter_block(given, out),
        }[name]

    def close(self) -> None:
        self._mpi.Finalize()
