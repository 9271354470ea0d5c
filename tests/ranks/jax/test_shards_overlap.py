"""Overlap of gradients that are sharded over the devices of a process.

Training must equal that of one device with the data of all ranks
(support/local_devices.py).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import local_devices as devices

import ringjax

pytestmark = [
    pytest.mark.ranks(3, env=devices.environment(4)),
    pytest.mark.launch("shards"),
    pytest.mark.usefixtures("world"),
]
KINDS = [AxisType.Auto, AxisType.Explicit]
# Small buckets, of one or two gradients each.
grads_mean = functools.partial(ringjax.allreduce_grads, overlap=True, bucket_bytes=256)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("donate", [False, True])
def test_training_equals_that_of_one_device_with_all_data(world, kind, donate) -> None:
    mesh = devices.mesh((2, 2), kind)
    params = devices.place(devices.parameters(), devices.TENSOR, mesh)
    options = {"donate_argnums": (0, 1)} if donate else {}
    devices.train_as_one(world, grads_mean(), params, mesh, **options)


def test_every_bucket_starts_and_ends_in_the_program(world) -> None:
    mesh = devices.mesh((4,))
    tx = grads_mean()
    tree = {name: np.ones(64) for name in "abc"}
    grads = devices.place(tree, dict.fromkeys("abc", P("d")), mesh)
    text = jax.jit(tx.update).lower(grads, tx.init(grads)).compile().as_text()
    for handler in ("start", "done"):
        assert text.count(f'custom_call_target="ringjax_meet_{handler}"') == 3
    assert 'custom_call_target="ringjax_meet"' not in text


def test_two_chains_in_a_scan(world) -> None:
    mesh = devices.mesh((4,))
    where = NamedSharding(mesh, P("d"))
    mean, top = grads_mean(), grads_mean(op=ringjax.Max)
    x = {"a": jnp.arange(8.0), "b": jnp.ones((4, 33))}
    x = jax.tree.map(lambda v: jax.device_put(v * (world.rank + 1), where), x)

    def body(states, _):
        a, one = mean.update(x, states[0])
        b, two = top.update(x, states[1])
        return (one, two), (a, b)

    states, (a, b) = jax.jit(
        lambda s: jax.lax.scan(body, s, length=4)
    )((mean.init(x), top.init(x)))  # fmt: skip
    for key, value in {"a": np.arange(8.0), "b": np.ones((4, 33))}.items():
        np.testing.assert_allclose(a[key], [value * (world.size + 1) / 2] * 4, 1e-12)
        np.testing.assert_array_equal(b[key], [value * world.size] * 4)
    assert [s.seq.tolist() for s in states] == [[4], [4]]


@pytest.mark.parametrize("check_vma", [False, True])
def test_inside_shard_map_with_collectives_of_xla(world, check_vma) -> None:
    mesh = devices.mesh((4,))
    tx = grads_mean()

    def each(x, state):
        grads = {str(i): jnp.tanh(x @ x.T) @ x + i for i in range(4)}
        updates, state = tx.update(grads, state)
        # Nothing orders these collectives of XLA against the buckets.
        rest = sum(jax.lax.psum(g.sum(), "d") for g in grads.values())
        return updates, rest, state

    f = jax.jit(
        jax.shard_map(
            each, mesh=mesh, in_specs=(P("d"), P()),
            out_specs=(P("d"), P(), P()), check_vma=check_vma,
        )
    )  # fmt: skip
    own = np.random.default_rng(0).normal(size=(32, 16))
    x = jax.device_put(own, NamedSharding(mesh, P("d")))
    state = tx.init(None)
    for _ in range(10):
        updates, _, state = jax.block_until_ready(f(x, state))
    for i, u in updates.items():
        want = [np.tanh(v @ v.T) @ v + int(i) for v in np.split(own, 4)]
        np.testing.assert_allclose(u, np.concatenate(want), 1e-9)
    assert state.seq.tolist() == [10]


def test_a_different_sharding_on_one_rank_raises_and_the_next_step_works(world) -> None:
    mesh = devices.mesh((2, 2))
    spec = P("d") if world.rank == 0 else P(None, "d")
    tx = grads_mean()
    for cut, fails in ((spec, True), (P("t"), False)):
        x = {"k": jax.device_put(np.ones((4, 4)), NamedSharding(mesh, cut))}
        update = jax.jit(tx.update)
        if fails:
            with pytest.raises(jax.errors.JaxRuntimeError, match="'k"):
                jax.block_until_ready(update(x, tx.init(x)))
        else:
            np.testing.assert_array_equal(
                update(x, tx.init(x))[0]["k"], np.ones((4, 4))
            )
