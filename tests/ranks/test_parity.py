"""The promise of data parallelism: N ranks train exactly what one rank would train.

Same global batch, 50 steps. The reference is plain JAX and optax on the whole batch,
computed inside each rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringjax

STEPS, BATCH, FEATURES = 50, 24, 6
X64 = {"JAX_ENABLE_X64": "1"}


def batches(dtype):
    rng = np.random.default_rng(3)
    for _ in range(STEPS):
        x = rng.normal(size=(BATCH, FEATURES)).astype(dtype)
        yield x, np.tanh(x.sum(-1)) ** 2


def initial(dtype):
    rng = np.random.default_rng(5)
    widths = (FEATURES, 16, 16, 1)
    return {
        f"layer_{i}": {
            "kernel": jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), dtype),
            "bias": jnp.zeros(b, dtype),
        }
        for i, (a, b) in enumerate(zip(widths, widths[1:], strict=False))
    }


def loss_fn(params, x, y):
    for name in sorted(params):
        x = jnp.tanh(x) @ params[name]["kernel"] + params[name]["bias"]
    return ((x[:, 0] - y) ** 2).mean()


def train(tx, dtype, rows):
    @jax.jit
    def step(params, state, x, y):
        grads = jax.grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = initial(dtype)
    state = tx.init(params)
    for x, y in batches(dtype):
        params, state = step(params, state, x[rows], y[rows])
    return params


def difference(a, b) -> float:
    """The largest difference, relative to the largest value of its leaf."""
    return max(
        float(np.abs(np.asarray(x) - y).max() / max(np.abs(y).max(), 1e-30))
        for x, y in zip(jax.tree.leaves(a), map(np.asarray, jax.tree.leaves(b)), strict=True)
    )


def check(world, optimizer, dtype, bound, **options) -> None:
    tx = optax.chain(ringjax.allreduce_grads(**options), optimizer)
    trained = train(tx, dtype, slice(world.rank, None, world.size))
    assert {x.dtype for x in jax.tree.leaves(trained)} == {jnp.dtype(dtype)}
    reference = train(optimizer, dtype, slice(None))
    assert difference(reference, initial(dtype)) > 0.01  # it has learnt something
    assert difference(trained, reference) < bound
    for leaf in jax.tree.leaves(trained):  # and all ranks hold the same bits
        everyone = np.asarray(ringjax.allgather(leaf[None]))
        assert (everyone == everyone[:1]).all()


OVERLAP = pytest.mark.parametrize("overlap", [False, True])


@pytest.mark.ranks(1, 2, 3, 4, env=X64)
@pytest.mark.parametrize("name", ["sgd", "momentum", "clipped"])
@OVERLAP
def test_float64_to_twelve_digits(world, name, overlap) -> None:
    optimizer = {
        "sgd": optax.sgd(0.05),
        "momentum": optax.sgd(0.05, 0.9),
        "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    }[name]
    check(world, optimizer, np.float64, 1e-12, overlap=overlap, bucket_bytes=600)


@pytest.mark.ranks(1, 2, 3, 4, env=X64)
@OVERLAP
def test_float64_adam(world, overlap) -> None:
    check(world, optax.adam(1e-3), np.float64, 1e-12, overlap=overlap, bucket_bytes=600)


@pytest.mark.ranks(1, 2, 3, 4)
@OVERLAP
def test_float32_to_rounding(world, overlap) -> None:
    # 50 steps add up rounding of 2^-24 a step; sgd does not amplify it much.
    check(world, optax.sgd(0.05), np.float32, 2e-5, overlap=overlap, bucket_bytes=300)


@pytest.mark.ranks(2, 4)
def test_bfloat16_on_the_wire_stays_near(world) -> None:
    bf16 = ringjax.Compression.bf16
    check(world, optax.sgd(0.05), np.float32, 3e-2, compression=bf16)


@pytest.mark.ranks(2)
def test_the_bound_would_notice_a_missing_allreduce(world) -> None:
    """The control: without it the ranks train apart."""
    optimizer = optax.sgd(0.05)
    apart = train(optimizer, np.float32, slice(world.rank, None, world.size))
    assert difference(apart, train(optimizer, np.float32, slice(None))) > 1e-3
