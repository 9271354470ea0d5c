"""ringjax inside jit, ringjax's core alone, and an empty call of jax."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers.adapter import (
    COLLECTIVES,
    Array,
    Operation,
    Peer,
    Shapes,
    jit_loop,
)


class Ringjax(Peer):
    """ringjax: calls in compiled programs, and of the core alone."""

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

    collectives: tuple[str, ...] = COLLECTIVES

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
        import jax.numpy as jnp

        import ringjax

        return float(ringjax.allreduce(jnp.float32(value), op=ringjax.Sum))

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        donated = (0, 1) if variant.endswith("donated") else ()
        if variant.startswith("core"):
            return self._core(shapes, dtype)
        make = self._gradients if "grads" in variant else self._array
        return make(shapes, dtype, donated)

    def _core(self, shapes: Shapes, dtype: str) -> Operation:
        import jax.numpy as jnp

        # numpy has no bfloat16, and the memory of jax's arrays can be written, too.
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
        return jit_loop(step, jnp.zeros(shapes[0], dtype), bool(donated))

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

    def collective(self, name: str, given: Array, out: Array) -> Operation:
        from ringjax import Sum, eager

        return {
            "allreduce": lambda: eager.allreduce(given, Sum, name=name, out=out),
            "broadcast": lambda: eager.broadcast(given, 0, name=name, out=out),
            "allgather": lambda: eager.allgather(given, name=name, out=out),
            "alltoall": lambda: eager.alltoall(given, name=name, out=out),
            "reducescatter": lambda: eager.reducescatter(
                given, Sum, name=name, out=out
            ),
        }[name]

    def close(self) -> None:
        import ringjax

        ringjax.shutdown()


class RingjaxTcp(Ringjax):
    """ringjax's core over sockets, with two ranks on one machine.

    An allreduce of half the bytes sends half of them in either direction.
    """

    arrays = models = ()
    streams = ("allreduce of half, core",)

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        return self._core([(shapes[0][0] // 2,)], dtype)


class JaxEmpty(Ringjax):
    """A compiled function that returns its input, to measure the cost of a call in jax.

    Nothing is exchanged. Only `total` uses ringjax.
    """

    arrays = models = ("nothing in jit, donated",)
    collectives = ()

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        import jax
        import jax.numpy as jnp

        step = jax.jit(lambda tree: jax.tree.map(lambda x: x, tree), donate_argnums=0)
        return jit_loop(step, [jnp.zeros(s, dtype) for s in shapes], True)
