"""mpi4jax, under mpirun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers.adapter import Array, Operation, Peer, Shapes, jit_loop


class Mpi4jax(Peer):
    """mpi4jax: an MPI's allreduce as an XLA custom call."""

    arrays = ("allreduce in jit",)
    models = ("one by one in one jit", "one array of all in one jit")
    dtypes = ("float32",)
    collectives = ("allreduce", "broadcast", "allgather", "alltoall")

    def __init__(self, rank: int, size: int, port: int) -> None:
        import jax
        import mpi4jax
        from mpi4py import MPI

        jax.config.update("jax_platforms", "cpu")
        self._world, self._sum = MPI.COMM_WORLD, MPI.SUM
        self.rank, self.size = self._world.rank, self._world.size
        self.version = f"{mpi4jax.__version__}, jax {jax.__version__}"
        self._mpi4jax = mpi4jax

    def total(self, value: float) -> float:
        import jax.numpy as jnp

        return float(self._add(jnp.float32(value)))

    def _add(self, x: Any) -> Any:
        return self._mpi4jax.allreduce(x, op=self._sum, comm=self._world)

    def _each(self, arrays: list[Any]) -> list[Any]:
        if len(arrays) == 1:
            return [self._add(arrays[0])]
        return [self._add(x) / self.size for x in arrays]

    def _joined(self, arrays: list[Any]) -> list[Any]:
        import jax.numpy as jnp

        mean = self._add(jnp.concatenate([x.reshape(-1) for x in arrays])) / self.size
        parts = jnp.split(mean, np.cumsum([x.size for x in arrays])[:-1])
        return [p.reshape(x.shape) for p, x in zip(parts, arrays, strict=True)]

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        import jax
        import jax.numpy as jnp

        step = jax.jit(self._joined if "of all" in variant else self._each)
        return jit_loop(step, [jnp.zeros(s, dtype) for s in shapes], False)

    def collective(self, name: str, given: Array, out: Array) -> Operation:
        """Makes the blocking function. XLA allocates new memory for results."""
        import jax
        import jax.numpy as jnp

        ours, world = self._mpi4jax, self._world
        function: dict[str, Callable[[Any], Any]] = {
            "allreduce": self._add,
            "broadcast": lambda x: ours.bcast(x, 0, comm=world),
            "allgather": lambda x: ours.allgather(x, comm=world),
            "alltoall": lambda x: ours.alltoall(x, comm=world),
        }
        shape = (self.size, -1) if name == "alltoall" else given.shape
        start = jnp.array(given.reshape(shape))
        return jit_loop(jax.jit(function[name]), start, False)

    def close(self) -> None:
        """Does nothing, because MPI ends with the process."""
