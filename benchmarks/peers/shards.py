"""An array that is sharded over four devices of each process, and reduced."""

from __future__ import annotations

import numpy as np

from benchmarks.peers.adapter import Operation, Shapes, jit_loop
from benchmarks.peers.jax_gloo import JaxGloo
from benchmarks.peers.ringjax import Ringjax

DEVICES = 4


class RingjaxShards(Ringjax):
    """ringjax: the shards of all devices of a process travel in one call."""

    arrays = ("jit", "jit, donated")
    models = collectives = ()

    def __init__(self, rank: int, size: int, port: int) -> None:
        import jax

        jax.config.update("jax_num_cpu_devices", DEVICES)
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        super().__init__(rank, size, port)

    def _array(self, shapes: Shapes, dtype: str, donated: tuple[int, ...]) -> Operation:
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        import ringjax

        mesh = jax.make_mesh((DEVICES,), ("shard",))
        cut = NamedSharding(mesh, PartitionSpec("shard"))
        array = jax.device_put(jnp.zeros(shapes[0], dtype), cut)
        step = jax.jit(ringjax.allreduce, donate_argnums=donated[:1])
        return jit_loop(step, array, bool(donated))


class JaxShards(JaxGloo):
    """pmean between the devices with the same shard, on a mesh of all processes."""

    arrays = ("pmean in jit", "pmean in jit, donated")
    models = collectives = ()

    def __init__(self, rank: int, size: int, port: int) -> None:
        super().__init__(rank, size, port, devices=DEVICES)

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        import jax
        import jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        devices = np.array(jax.devices()).reshape(self.size, DEVICES)
        mesh = Mesh(devices, ("ranks", "shard"))
        spec = PartitionSpec("ranks", "shard")
        row = np.zeros((1, *shapes[0]), jnp.dtype(dtype))
        cut = NamedSharding(mesh, spec)
        array = jax.make_array_from_process_local_data(cut, row)
        mean = jax.shard_map(
            lambda x: jax.lax.pmean(x, "ranks"),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )
        donated = variant.endswith("donated")
        return jit_loop(
            jax.jit(mean, donate_argnums=0 if donated else ()), array, donated
        )
