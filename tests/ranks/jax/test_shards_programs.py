"""Programs over several devices: flax, AOT compilation, caches, micro batches."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import local_devices as devices

import ringjax

pytestmark = [
    pytest.mark.ranks(3, env=devices.environment(4)),
    pytest.mark.launch("shards"),
    pytest.mark.usefixtures("world"),
]
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def shard(x, mesh):
    """Shards `x` over its first dimension if that is a multiple of the devices."""
    fits = x.ndim > 0 and x.shape[0] % mesh.size == 0
    return jax.device_put(x, NamedSharding(mesh, P("d") if fits else P()))


def batches(world, mesh, steps=3):
    for step in range(steps):
        yield shard(devices.data(world.rank, step), mesh)


def whole(world, steps=3):
    for step in range(steps):
        yield np.concatenate([devices.data(r, step) for r in range(world.size)])


def same(got, want) -> None:
    """Checks that two trees are close, and `got` has equal bits on all ranks."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), 1e-12, 1e-14)
    flat = [np.asarray(x).tobytes() for x in jax.tree.leaves(got)]
    assert all(other == flat for other in ringjax.allgather_object(flat))


@OVERLAP
def test_flax_nnx(world, overlap) -> None:
    mesh = devices.mesh((4,))

    def trained(transform, data, place):
        model = nnx.Sequential(
            nnx.Linear(8, 16, rngs=nnx.Rngs(0), param_dtype=jnp.float64), jnp.tanh,
            nnx.Linear(16, 4, rngs=nnx.Rngs(1), param_dtype=jnp.float64),
        )  # fmt: skip
        nnx.update(model, jax.tree.map(place, nnx.state(model)))
        tx = optax.chain(transform, optax.adam(0.01))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            grads = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
            optimizer.update(model, grads)

        for x in data:
            step(model, optimizer, x)
            jax.block_until_ready(nnx.state(model))
        return nnx.state(model, nnx.Param)

    tx = ringjax.allreduce_grads(overlap=overlap)
    got = trained(tx, batches(world, mesh), lambda x: shard(x, mesh))
    same(got, trained(optax.identity(), whole(world), lambda x: x))


@OVERLAP
def test_flax_linen_compiled_ahead_of_time(world, overlap) -> None:
    mesh = devices.mesh((4,))
    model = linen.Dense(16, param_dtype=jnp.float64)
    start = model.init(jax.random.key(0), np.ones((1, 8)))

    def trained(transform, data, params, *, ahead):
        tx = optax.chain(transform, optax.sgd(0.1))

        @jax.jit
        def step(params, state, x):
            grads = jax.grad(lambda p: (model.apply(p, x) ** 2).mean())(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state, run = tx.init(params), step
        for x in data:
            if ahead and run is step:
                where = jax.tree.map(lambda v: v.sharding, params), None
                fixed = jax.jit(step, out_shardings=where)
                run = fixed.lower(params, state, x).compile()
                state = jax.device_put(state, run.input_shardings[0][1])
            params, state = jax.block_until_ready(run(params, state, x))
            if ahead:
                state = jax.device_put(state, run.input_shardings[0][1])
        return params

    params = jax.tree.map(lambda x: shard(x, mesh), start)
    tx = ringjax.allreduce_grads(overlap=overlap)
    got = trained(tx, batches(world, mesh), params, ahead=True)
    same(got, trained(optax.identity(), whole(world), start, ahead=False))


@OVERLAP
def test_micro_batches(world, overlap) -> None:
    mesh = devices.mesh((4,))
    inner = optax.chain(ringjax.allreduce_grads(overlap=overlap), optax.sgd(1.0))
    tx = optax.MultiSteps(inner, 2)
    params = shard(jnp.zeros(8), mesh)
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(4):
        grads = shard(jnp.full(8, float(world.rank + step)), mesh)
        updates, state = jax.block_until_ready(update(grads, state, params))
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, -np.full(8, world.size - 1 + 3.0), 1e-12)


@OVERLAP
def test_from_the_persistent_cache(world, overlap, tmp_path: Path) -> None:
    mesh = devices.mesh((4,))
    tx = ringjax.allreduce_grads(op=ringjax.Sum, overlap=overlap)
    x = shard(jnp.arange(8.0), mesh)
    names = {
        "jax_remove_custom_partitioning_ptr_from_cache_key": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    hits: list[str] = []

    def listen(event: str, **_: object) -> None:
        hits.append(event)

    jax.monitoring.register_event_listener(listen)
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    try:
        for _ in range(2):
            hits.clear()
            jax.clear_caches()
            compilation_cache.reset_cache()
            updates, _ = jax.jit(tx.update)(x, tx.init(x))
            np.testing.assert_array_equal(updates, np.arange(8.0) * world.size)
    finally:
        jax.monitoring.unregister_event_listener(listen)
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert [p for p in tmp_path.iterdir() if "jit_update" in p.name]
    assert "/jax/compilation_cache/cache_hits" in hits
    assert "/jax/compilation_cache/cache_misses" not in hits


def test_jax_export_is_refused(world) -> None:
    mesh = devices.mesh((4,))
    tx = ringjax.allreduce_grads()
    x = shard(jnp.arange(8.0), mesh)
    with pytest.raises(NotImplementedError, match="serialization"):
        jax.export.export(jax.jit(tx.update))(x, tx.init(x))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_without_a_mesh_work_under_a_mesh(world, kind) -> None:
    """Arrays with different shapes on the ranks must not be placed on the mesh."""
    rank, n = world.rank, world.size
    own = np.full((rank + 1, 2), float(rank))
    everyone = np.concatenate([np.full((r + 1, 2), float(r)) for r in range(n)])
    with jax.set_mesh(devices.mesh((4,), kind)):
        assert ringjax.allgather_object(rank) == list(range(n))
        assert ringjax.allreduce_metrics({"loss": rank}) == {"loss": (n - 1) / 2}
        np.testing.assert_array_equal(ringjax.allgather(own), everyone)
        got = ringjax.reducescatter(np.arange(2.0 * n), op=ringjax.Sum)
        np.testing.assert_array_equal(got, n * (2.0 * rank + np.arange(2)))
        got = ringjax.alltoall(np.arange(n) + 10.0 * rank)
        np.testing.assert_array_equal(got, 10.0 * np.arange(n) + rank)
        got = ringjax.broadcast_parameters({"w": own[:1], "step": rank}, 1)
        np.testing.assert_array_equal(got["w"], [[1.0, 1.0]])
        assert got["step"] == 1
        state = ringjax.elastic.State(w=own[:1], step=rank)
        state.sync()
        assert state.step == 0 and not state.w.any()
        # After `sync`, the mesh is set again.
        assert jnp.ones(4).sharding.num_devices == 4
