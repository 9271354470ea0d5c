"""XLA's own CPU collectives, by psum over processes: on Gloo, or on ringjax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers.adapter import Array, Operation, Peer, Shapes, jit_loop


class JaxGloo(Peer):
    """jax.lax.psum over processes: XLA's own CPU collectives, on Gloo."""

    arrays = ("psum in jit", "psum in jit, donated")
    models = (
        "psum of the tree in jit",
        "pmean of the tree in jit",
        "pmean of the tree in jit, donated",
    )
    collectives = ("allreduce", "allgather", "alltoall", "reducescatter")

    def __init__(self, rank: int, size: int, port: int, devices: int = 1) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.rank, self.size, self.version = rank, size, jax.__version__
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
        self._mesh = Mesh(np.array(jax.devices()[::devices]), ("ranks",))
        self._spec = PartitionSpec("ranks")
        self._sharding = NamedSharding(self._mesh, self._spec)

    def _make(
        self, shape: tuple[int, ...], dtype: str = "float32", value: float = 0.0
    ) -> Any:
        """Makes an array with one row for each rank."""
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
        import jax

        add = self._compile(lambda x: jax.lax.psum(x, "ranks"), False)
        out = add(self._make((1,), value=value))
        return float(self.local(out)[0, 0])

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        import jax

        reduce = jax.lax.psum if variant.startswith("psum") else jax.lax.pmean
        donated = variant.endswith("donated")
        step = self._compile(lambda tree: reduce(tree, "ranks"), donated)
        return jit_loop(step, [self._make(s, dtype) for s in shapes], donated)

    def collective(self, name: str, given: Array, out: Array) -> Operation:
        """Makes the blocking function. XLA allocates new memory for results."""
        import jax
        from jax import lax

        function: dict[str, Callable[[Any], Any]] = {
            "allreduce": lambda x: lax.psum(x, "ranks"),
            "allgather": lambda x: lax.all_gather(x, "ranks", axis=1, tiled=True),
            "alltoall": lambda x: lax.all_to_all(x, "ranks", 1, 1, tiled=True),
            "reducescatter": lambda x: lax.psum_scatter(
                x, "ranks", scatter_dimension=1, tiled=True
            ),
        }
        rows = jax.make_array_from_process_local_data(self._sharding, given[None])
        return jit_loop(self._compile(function[name], False), rows, False)

    def local(self, result: Any) -> Array:
        return np.asarray(result.addressable_shards[0].data)

    def close(self) -> None:
        import jax

        jax.distributed.shutdown()  # type: ignore[no-untyped-call]


class JaxOnRingjax(JaxGloo):
    """Runs the same program with RINGJAX_JAX_COLLECTIVES=1, by ringjax."""
