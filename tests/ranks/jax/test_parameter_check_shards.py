"""The parameter check on parameters that are sharded over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import local_devices as devices
from support.parameter_warnings import (
    check_every,
    errors,
    read_warnings,
    warning_of_rank_0,
)

import ringjax

EVERY = 3
pytestmark = [
    pytest.mark.ranks(3, env=devices.environment(4)),
    pytest.mark.launch("shards"),
]
KINDS = [AxisType.Auto, AxisType.Explicit]


@pytest.fixture(autouse=True)
def equal_before(world, capfd, monkeypatch) -> None:
    """Checks equal parameters, which ends a difference that an earlier test left."""
    check_every(monkeypatch, EVERY)
    tx, ones = ringjax.allreduce_grads(), jnp.ones(1)
    jax.block_until_ready(tx.update(ones, tx.init(ones), ones))
    errors(capfd)


def train(tx, params, state, steps):
    """Makes steps that change the parameters equally on all ranks."""

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(jnp.ones_like, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = jax.block_until_ready(step(params, state))
    return params, state


def parts(mesh):
    rng = np.random.default_rng(0)
    tree = {"cut": rng.normal(size=(8, 5)), "whole": rng.normal(size=7)}
    return devices.place(tree, {"cut": P("d"), "whole": P()}, mesh)


def change(x, at, by):
    """Adds `by` to an element of `x` on this rank, with the same sharding."""
    value = np.array(x)
    value[at] += by
    return jax.device_put(value, x.sharding)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_a_different_shard_is_named_once(world, capfd, kind) -> None:
    mesh = devices.mesh((4,), kind)
    tx = optax.chain(ringjax.allreduce_grads(), optax.sgd(0.1))
    with jax.set_mesh(mesh):
        params = parts(mesh)
        params, state = train(tx, params, tx.init(params), EVERY)
        assert read_warnings(capfd) == []
        if world.rank == 1:
            params["cut"] = change(params["cut"], (5, 3), 1.0)
        params, state = train(tx, params, state, 2 * EVERY)
        want = warning_of_rank_0(world, EVERY, "cut[4:6,0:5]", 1)
        assert read_warnings(capfd) == want
        params, state = train(tx, parts(mesh), state, EVERY)  # equal again
        if world.rank == 1:
            params["whole"] = change(params["whole"], 0, 1e-9)
        train(tx, params, state, EVERY)
        want = warning_of_rank_0(world, 4 * EVERY, "whole", 1)
        assert read_warnings(capfd) == want


def test_a_different_sharding_on_one_rank_is_reported_and_training_continues(
    world, capfd
) -> None:
    mesh = devices.mesh((4,))
    tx = ringjax.allreduce_grads()
    value = np.ones((4, 4))
    spec = P("d") if world.rank == 0 else P(None, "d")
    params = jax.device_put(value, NamedSharding(mesh, spec))
    grads = jax.device_put(value, NamedSharding(mesh, P("d")))
    update = jax.jit(tx.update, out_shardings=(grads.sharding, None))
    updates, _ = update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates, value)
    want = warning_of_rank_0(world, 0, "their shards", 0)
    assert read_warnings(capfd) == want


def test_inside_of_shard_map(world, capfd) -> None:
    mesh = devices.mesh((4,))
    tx = ringjax.allreduce_grads()
    x = np.arange(8.0)
    x[6] += world.rank == 1
    params = jax.device_put(x, NamedSharding(mesh, P("d")))
    update = jax.shard_map(
        lambda p, state: tx.update(p, state, p),
        mesh=mesh, in_specs=(P("d"), P()), out_specs=(P("d"), P()),
    )  # fmt: skip
    updates, _ = jax.jit(update)(params, tx.init(None))
    ones = np.arange(8.0)
    ones[6] += 1 / world.size
    np.testing.assert_allclose(updates, ones, 1e-12)
    assert read_warnings(capfd) == warning_of_rank_0(world, 0, "@d=3", 1)
