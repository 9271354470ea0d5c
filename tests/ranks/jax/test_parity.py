"""The promise of data parallelism: N ranks train to the parameters of one process.

Training takes 50 steps with one global batch. The reference is plain JAX and optax on
the whole batch, which each rank computes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringjax

STEPS, BATCH, FEATURES = 50, 24, 6

# All optimizers run on three ranks, and one of each kind of call also on two.
RANKS, SOME_RANKS = pytest.mark.ranks(3), pytest.mark.ranks(2, 3)
pytestmark = pytest.mark.launch("collectives")


@pytest.fixture(autouse=True)
def enable_x64(world) -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def batches(dtype):
    rng = np.random.default_rng(3)
    for _ in range(STEPS):
        x = rng.normal(size=(BATCH, FEATURES)).astype(dtype)
        yield x, np.tanh(x.sum(-1)) ** 2


def initial(dtype):
    rng = np.random.default_rng(5)
    widths = itertools.pairwise((FEATURES, 16, 16, 1))
    return {
        f"layer_{i}": {
            "kernel": (rng.normal(size=(a, b)) / np.sqrt(a)).astype(dtype),
            "bias": np.zeros(b, dtype),
        }
        for i, (a, b) in enumerate(widths)
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

    params = jax.device_put(initial(dtype))
    state = tx.init(params)
    for x, y in batches(dtype):
        params, state = step(params, state, x[rows], y[rows])
    return params


def difference(a, b) -> float:
    """Returns the largest difference, relative to the largest value of its leaf."""
    return max(
        float(np.abs(np.asarray(x) - y).max() / max(np.abs(y).max(), 1e-30))
        for x, y in zip(
            jax.tree.leaves(a), map(np.asarray, jax.tree.leaves(b)), strict=True
        )
    )


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, 0.9),
    "adam": lambda: optax.adam(1e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
}


@functools.cache
def reference(name, dtype):
    return train(OPTIMIZERS[name](), dtype, slice(None))


def check(world, name, dtype, bound, **options) -> None:
    tx = optax.chain(ringjax.allreduce_grads(**options), OPTIMIZERS[name]())
    trained = train(tx, dtype, slice(world.rank, None, world.size))
    assert {x.dtype for x in jax.tree.leaves(trained)} == {jnp.dtype(dtype)}
    expected = reference(name, dtype)
    assert difference(expected, initial(dtype)) > 0.01  # training has an effect
    assert difference(trained, expected) < bound
    digest = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trained)]
    everyone = ringjax.allgather_object(digest)
    assert everyone == [digest] * world.size  # all ranks have equal bits


@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        pytest.param("sgd", False, marks=RANKS),
        pytest.param("sgd", True, marks=SOME_RANKS),
        pytest.param("momentum", False, marks=RANKS),
        pytest.param("clipped", True, marks=RANKS),
        pytest.param("adam", False, marks=SOME_RANKS),
        pytest.param("adam", True, marks=RANKS),
    ],
)
def test_float64_to_twelve_digits(world, name, overlap) -> None:
    check(world, name, np.float64, 1e-12, overlap=overlap, bucket_bytes=600)


@SOME_RANKS
@pytest.mark.parametrize("overlap", [False, True])
def test_float32_to_rounding(world, overlap) -> None:
    # Each of 50 steps rounds by 2^-24, and SGD does not amplify the errors much.
    check(world, "sgd", np.float32, 2e-5, overlap=overlap, bucket_bytes=300)


@pytest.mark.ranks(2)
def test_bfloat16_on_the_wire_stays_close(world) -> None:
    bf16 = ringjax.Compression.bf16
    check(world, "sgd", np.float32, 3e-2, compression=bf16)


@pytest.mark.ranks(2)
def test_the_bound_would_notice_a_missing_allreduce(world) -> None:
    """A control: without an allreduce, ranks train to different parameters."""
    rows = slice(world.rank, None, world.size)
    apart = train(OPTIMIZERS["sgd"](), np.float32, rows)
    assert difference(apart, reference("sgd", np.float32)) > 1e-3
