"""Adapters of what runs inside JAX: ringjax, XLA's own collectives, mpi4jax.

Each as its users would call it. When and how often: worker.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers.adapter import Operation, Peer, Shapes


class Ringjax(Peer):
    """ringjax: the core alone, and what a compiled program calls."""

    arrays: tuple[str, ...] = (
        "jit",
        "jit, donated",
        "allreduce_grads in jit, donated",
        "core, numpy in place",
    )
    models: tuple[str, ...] = (
        "allreduce_grads in jit",
        "allreduce_grads in jit, donated",
        "core, numpy in place",
    )

    def __init__(self, rank: int, size: int, port: int) -> None:
        import jax

        import ringjax
        from ringjax import _native, runtime

        ringjax.init()
        self.rank, self.size = ringjax.rank(), ringjax.size()
        self.version = f"{ringjax.__version__}, jax {jax.__version__}"
        self._communicator = runtime.communicator()
        self._allreduce = _native.COLLECTIVES["allreduce"]
        self._ops = _native.REDUCE_OPS

    def total(self, value: float) -> float:
        """Adds `value` of all ranks."""
        import jax.numpy as jnp

        import ringjax

        return float(ringjax.allreduce(jnp.float32(value), op=ringjax.Sum))

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        """Makes the blocking function."""
        donated = (0, 1) if variant.endswith("donated") else ()
        if variant.startswith("core"):
            return self._core(shapes, dtype)
        make = self._gradients if "grads" in variant else self._array
        return make(shapes, dtype, donated)

    def _core(self, shapes: Shapes, dtype: str) -> Operation:
        import jax.numpy as jnp

        # numpy has no bfloat16 to hand over; what jax made can be written to as well.
        make: Any = np if dtype == "float32" else jnp
        arrays = [make.zeros(s, dtype) for s in shapes]
        op = self._ops["Sum" if len(arrays) == 1 else "Average"]
        return lambda: self._communicator.execute(self._allreduce, op, arrays, arrays)

    def _array(self, shapes: Shapes, dtype: str, donated: tuple[int, ...]) -> Operation:
        import jax
        import jax.numpy as jnp

        import ringjax

        step = jax.jit(
            lambda x: ringjax.allreduce(x, op=ringjax.Sum), donate_argnums=donated[:1]
        )
        return _loop(step, jnp.zeros(shapes[0], dtype), bool(donated))

    def _gradients(
        self, shapes: Shapes, dtype: str, donated: tuple[int, ...]
    ) -> Operation:
        import jax
        import jax.numpy as jnp

        import ringjax

        op = ringjax.Sum if len(shapes) == 1 else ringjax.Average
        transformation = ringjax.allreduce_grads(op)
        update = jax.jit(transformation.update, donate_argnums=donated)
        gradients = [jnp.zeros(s, dtype) for s in shapes]
        held = [gradients, transformation.init(gradients)]

        def step() -> None:
            updates, held[1] = jax.block_until_ready(update(*held))
            if donated:
                held[0] = updates

        return step

    def close(self) -> None:
        """Leaves the world."""
        import ringjax

        ringjax.shutdown()


class RingjaxTcp(Ringjax):
    """ringjax's core over sockets although the ranks share a machine: two of them.

    An allreduce of half the bytes sends half of them in either direction.
    """

    arrays = models = ()
    streams = ("allreduce of half, core",)

    def __init__(self, rank: int, size: int, port: int) -> None:
        os.environ["RINGJAX_SHM"] = "0"
        super().__init__(rank, size, port)

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        """Makes the blocking function."""
        return self._core([(shapes[0][0] // 2,)], dtype)


class JaxEmpty(Ringjax):
    """A compiled function that returns what it is given: what jax takes for a call.

    Nothing is exchanged; ringjax only adds up `total`.
    """

    arrays = models = ("nothing in jit, donated",)

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        """Makes the blocking function."""
        import jax
        import jax.numpy as jnp

        step = jax.jit(lambda tree: jax.tree.map(lambda x: x, tree), donate_argnums=0)
        return _loop(step, [jnp.zeros(s, dtype) for s in shapes], True)


class JaxGloo(Peer):
    """jax.lax.psum over processes: XLA's own CPU collectives, on Gloo."""

    arrays = ("psum in jit", "psum in jit, donated")
    models = ("pmean of the tree in jit", "pmean of the tree in jit, donated")

    def __init__(self, rank: int, size: int, port: int) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.rank, self.size, self.version = rank, size, jax.__version__
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
        self._mesh = Mesh(np.array(jax.devices()), ("ranks",))
        self._spec = PartitionSpec("ranks")
        self._sharding = NamedSharding(self._mesh, self._spec)

    def _make(
        self, shape: tuple[int, ...], dtype: str = "float32", value: float = 0.0
    ) -> Any:
        """An array with one row for each rank."""
        import jax
        import jax.numpy as jnp

        row = np.full((1, *shape), value, jnp.dtype(dtype))
        return jax.make_array_from_process_local_data(self._sharding, row)

    def _compile(self, function: Callable[[Any], Any], donated: bool) -> Any:
        import jax

        mapped = jax.shard_map(
            function, mesh=self._mesh, in_specs=self._spec, out_specs=self._spec
        )
        return jax.jit(mapped, donate_argnums=(0,) if donated else ())

    def total(self, value: float) -> float:
        """Adds `value` of all ranks."""
        import jax

        add = self._compile(lambda x: jax.lax.psum(x, "ranks"), False)
        out = add(self._make((1,), value=value))
        return float(np.asarray(out.addressable_shards[0].data)[0, 0])

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        """Makes the blocking function."""
        import jax

        reduce = jax.lax.psum if variant.startswith("psum") else jax.lax.pmean
        donated = variant.endswith("donated")
        step = self._compile(lambda tree: reduce(tree, "ranks"), donated)
        return _loop(step, [self._make(s, dtype) for s in shapes], donated)

    def close(self) -> None:
        """Leaves the world."""
        import jax

        jax.distributed.shutdown()  # type: ignore[no-untyped-call]


def _loop(step: Callable[[Any], Any], start: Any, donated: bool) -> Operation:
    """Calls a compiled function on the same input, or on its own last output."""
    import jax

    held = [start]

    def once() -> None:
        out = jax.block_until_ready(step(held[0]))
        if donated:
            held[0] = out

    return once


class Mpi4jax(Peer):
    """mpi4jax: an MPI's allreduce as an XLA custom call."""

    arrays = ("allreduce in jit",)
    models = ("one by one in one jit", "one array of all in one jit")
    dtypes = ("float32",)

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
        """Adds `value` of all ranks."""
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
        """Makes the blocking function."""
        import jax
        import jax.numpy as jnp

        step = jax.jit(self._joined if "of all" in variant else self._each)
        return _loop(step, [jnp.zeros(s, dtype) for s in shapes], False)

    def close(self) -> None:
        """MPI ends with the process."""
