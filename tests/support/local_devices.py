"""Ranks with several CPU devices, and a training program with known results.

The reference is the training program on one device, with the data of all ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax


@functools.cache  # tests with an equal object share a launch
def environment(devices: int, **more: str) -> Callable[[], Mapping[str, str]]:
    """Returns a function that makes the variables for ranks with `devices` devices.

    XLA's own collectives block a thread for each device, and XLA has few threads on a
    small machine. Concurrent programs hang there even without ringjax, so asynchronous
    dispatch is off.
    """

    def made() -> Mapping[str, str]:
        count = f"--xla_force_host_platform_device_count={devices}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {count}"
        return {
            "XLA_FLAGS": flags,
            "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
            "JAX_ENABLE_X64": "1",
            **more,
        }

    return made


def mesh(shape: tuple[int, ...], kind: AxisType = AxisType.Auto, devices: Any = None):
    """Makes a mesh with the axes "d" and "t", or only "d" if `shape` has one entry."""
    names = ("d", "t")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def place(tree: Any, specs: Any, on: Any) -> Any:
    """Places `tree`, which is equal in all processes, on the devices of mesh `on`."""

    def put(x: Any, spec: P) -> Any:
        return jax.make_array_from_callback(
            np.shape(x), NamedSharding(on, spec), lambda index: np.asarray(x)[index]
        )

    return jax.tree.map(put, tree, specs)


# Leaves that are sharded by rows, by columns, or replicated. "odd" has odd sizes,
# "half" is bfloat16, and "scale" is a scalar.
FSDP = {
    "in": P("d"), "out": P(None, "d"), "bias": P(), "odd": P(), "half": P("d"),
    "scale": P(),
}  # fmt: skip
TENSOR = {**FSDP, "in": P("d", "t"), "out": P("t", "d"), "half": P(("d", "t"))}


def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"in": (8, 16), "out": (16, 4), "bias": (16,), "odd": (3, 5), "scale": ()}
    params = {name: rng.normal(size=size) for name, size in sizes.items()}
    return {**params, "half": rng.normal(size=(8,)).astype(jnp.bfloat16)}


def data(rank: int, step: int, rows: int = 8) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=(rows, 8))


def loss(params: Mapping[str, Any], x: Any) -> Any:
    # On explicit axes, JAX does not gather shards automatically.
    if jax.typeof(x).sharding.mesh.explicit_axes:
        params = {k: jax.sharding.reshard(v, P()) for k, v in params.items()}
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    out = jnp.sin(hidden @ params["out"]) * params["scale"]
    rest = (params["odd"] ** 2).sum() + (params["half"].astype(float) ** 3).sum() / 64
    return (out**2).sum(-1).mean() + rest


def train(
    transform: optax.GradientTransformation,
    params: Any,
    batch: Callable[[int], Any],
    steps: int = 5,
    **jit: Any,
) -> tuple[Any, Any]:
    """Returns parameters and optimizer state after `steps` steps on ``batch(step)``."""
    tx = optax.chain(transform, optax.sgd(0.05, 0.9))

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run, state = jax.jit(step, **jit), tx.init(params)
    for number in range(steps):
        params, state = jax.block_until_ready(run(params, state, batch(number)))
    return params, state


def expected(size: int, steps: int = 5, rows: int = 8) -> Any:
    """Trains without ringjax, on one device, with the data of all ranks."""

    def everything(step: int) -> Any:
        return np.concatenate([data(rank, step, rows) for rank in range(size)])

    return train(optax.identity(), parameters(), everything, steps)[0]


def train_as_one(world: Any, transform: Any, params: Any, on: Any, **jit: Any) -> None:
    """Trains on this rank's data on the mesh `on`, and checks the result."""

    def batch(step: int) -> Any:
        return jax.device_put(data(world.rank, step), NamedSharding(on, P("d")))

    with jax.set_mesh(on):
        got, state = train(transform, params, batch, **jit)
    for key, value in expected(world.size).items():
        rtol = 2e-2 if value.dtype == jnp.bfloat16 else 1e-12
        np.testing.assert_allclose(
            *(np.asarray(v, np.float64) for v in (got[key], value)), rtol, rtol
        )
        if AxisType.Explicit in on.axis_types:  # on other axes, XLA chooses a sharding
            where = params[key].sharding
            assert got[key].sharding.is_equivalent_to(where, value.ndim)
    same_bits_everywhere(got)
    assert state[0].seq.tolist() == [5]


def same_bits_everywhere(tree: Any) -> None:
    """Checks that all ranks and all devices with equal shards hold equal bits."""
    for leaf in jax.tree.leaves(tree):
        seen: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            piece = np.asarray(shard.data).tobytes()
            assert seen.setdefault(str(shard.index), piece) == piece
    flat = [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]
    assert all(other == flat for other in ringjax.allgather_object(flat))
