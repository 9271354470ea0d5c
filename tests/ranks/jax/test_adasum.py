"""op=Adasum under jit, in an optimizer and in a process set, and where it is refused.

../test_eager_grid.py and tests/native/adasum_test.cc test four ranks and all shapes.
The expected results come from the formula of Adasum, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.stacked import FLOATS, equal, raises

import ringjax
from ringjax import Adasum, allreduce

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.ranks(2),
    pytest.mark.launch("collectives"),
]

TOLERANCE = {"float16": 5e-3, "bfloat16": 4e-2, "float32": 1e-5, "float64": 1e-13}


def adasum(xs: Sequence[np.ndarray]) -> np.ndarray:
    """Computes the result that all ranks must have, in float64."""
    if len(xs) == 1:
        return np.asarray(xs[0], np.float64)
    half = len(xs) // 2
    a, b = adasum(xs[:half]), adasum(xs[half:])
    dot, aa, bb = np.sum(a * b), np.sum(a * a), np.sum(b * b)
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


def draw(size: int, shape: tuple[int, ...], dtype: Any, seed: int = 0) -> list[Any]:
    """Draws an array for each rank; no two arrays are parallel."""
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=shape) + 0.5).astype(jnp.dtype(dtype)) for _ in range(size)
    ]


def close(actual: Any, xs: Sequence[np.ndarray]) -> None:
    expected = adasum(xs).astype(xs[0].dtype)
    equal(actual, expected, TOLERANCE[xs[0].dtype.name])


def same_bits(tree: Any) -> None:
    """Checks that all ranks have the same values, bit for bit."""
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    raw = np.frombuffer(b"".join(leaves), np.uint8)
    rows = np.asarray(ringjax.allgather(raw[None]))
    np.testing.assert_array_equal(rows, np.broadcast_to(raw, rows.shape))


def calls() -> int:
    from ringjax import runtime

    communicator = runtime.communicator(ringjax.global_process_set, "test")
    stats = communicator.stats().get("allreduce", {"algorithms": {}})
    return int(stats["algorithms"].get("adasum", 0))


@pytest.mark.ranks(1, 2)
def test_every_dtype(world) -> None:
    shapes = [(), (0,), (3, 5)]
    stacks = [
        draw(world.size, shape, dtype, seed)
        for dtype in FLOATS
        for seed, shape in enumerate(shapes)
    ]
    mine = [jax.device_put(xs[world.rank]) for xs in stacks]
    before = calls()
    for f in (allreduce, jax.jit(allreduce, static_argnums=1)):
        out = f(mine, Adasum)
        for value, xs in zip(out, stacks, strict=True):
            close(value, xs)
        same_bits(out)
    # Each of the two steps made one call for each dtype, and no other calls.
    assert calls() - before == 2 * len(FLOATS)
    grouped = ringjax.grouped_allreduce(mine[-2:], op=Adasum, name="pair")
    for value, xs in zip(grouped, stacks[-2:], strict=True):
        close(value, xs)


def test_long_tensors_and_scaling(world) -> None:
    xs = draw(world.size, (700_001,), "float32")
    close(allreduce(xs[world.rank], Adasum), xs)
    out = allreduce(
        xs[world.rank], Adasum, prescale_factor=0.5, postscale_factor=8.0, name="x"
    )
    close(out / 4, xs)


def test_properties(world) -> None:
    v = jnp.arange(1.0, 9.0)
    equal(allreduce(v, Adasum), np.arange(1.0, 9.0))
    mine = jnp.zeros(8).at[world.rank].set(3.0)
    expected = np.where(np.arange(8) < world.size, 3.0, 0.0)
    equal(allreduce(mine, Adasum), expected)
    # Adasum weights every tensor separately, so other tensors do not change a result.
    pair = allreduce([mine, v, jnp.zeros(4)], Adasum)
    equal(pair[0], expected)
    equal(pair[1], np.arange(1.0, 9.0))
    equal(pair[2], np.zeros(4))


@pytest.mark.parametrize("overlap", [False, True])
def test_adasum_in_an_optimizer(world, overlap) -> None:
    shapes = {"w": (17, 9), "b": (9,), "scale": ()}
    stacks = {k: draw(world.size, s, "float32") for k, s in shapes.items()}
    grads = {k: jnp.asarray(xs[world.rank]) for k, xs in stacks.items()}
    tx = optax.chain(
        ringjax.allreduce_grads(Adasum, overlap=overlap, bucket_bytes=64),
        optax.sgd(0.5),
    )
    state = tx.init(grads)
    update = jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(grads, state)
    for k, xs in stacks.items():
        equal(updates[k], (-0.5 * adasum(xs)).astype(np.float32), 1e-5)
    same_bits(updates)


def test_adasum_in_a_loop(world) -> None:
    xs = draw(world.size, (5, 7), "float64")
    mine = jnp.asarray(xs[world.rank])
    rows = jax.jit(lambda x: jax.lax.map(lambda row: allreduce(row, Adasum), x))(mine)
    for i in range(5):
        close(rows[i], [x[i] for x in xs])


def test_derivatives_and_vmap_are_refused(world) -> None:
    x = jnp.ones(3)
    f = lambda x: jnp.sum(allreduce(x, Adasum))  # noqa: E731
    no_derivative = raises(TypeError, "ringjax.allreduce: op=Adasum has no derivative")
    for derive in (jax.grad(f), jax.jit(jax.grad(f)), jax.jacfwd(f)):
        with no_derivative:
            derive(x)
    with raises(TypeError, "ringjax.allreduce: op=Adasum has no transpose"):
        jax.linear_transpose(lambda x: allreduce(x, Adasum), x)(x)
    with raises(TypeError, "ringjax.allreduce: op=Adasum has no vmap", "jax.lax.map"):
        jax.vmap(lambda x: allreduce(x, Adasum))(jnp.ones((2, 3)))
    tx = ringjax.allreduce_grads(Adasum)
    state = tx.init(x)
    with raises(TypeError, "ringjax.allreduce_grads: op=Adasum has no vmap"):
        jax.vmap(lambda g: tx.update(g, state)[0])(jnp.ones((2, 3)))
    with raises(TypeError, "ringjax.allreduce_grads: op=Adasum has no derivative"):
        jax.grad(lambda g: jnp.sum(tx.update(g, state)[0]))(x)
    # With stop_gradient, Adasum is allowed inside a function that is differentiated.
    both = jax.grad(lambda x: jnp.sum(x**2) + f(jax.lax.stop_gradient(x)))(x)
    equal(both, 2 * np.ones(3))


def test_unsupported_arguments_are_refused(world) -> None:
    for dtype in ("int32", "bool", "complex64"):
        with raises(TypeError, "ringjax.allreduce: op=Adasum is not defined", dtype):
            allreduce(jnp.ones(3, dtype), Adasum)
    with raises(ValueError, "`compression` is not supported with op=Adasum"):
        allreduce(jnp.ones(3), Adasum, compression=ringjax.Compression.bf16)
    with raises(ValueError, "ringjax.reducescatter: op=Adasum is for allreduce"):
        ringjax.reducescatter(jnp.ones(4), Adasum)
    with raises(ValueError, "ringjax.allreduce_metrics: op=Adasum is for allreduce"):
        ringjax.allreduce_metrics(1.0, Adasum)
    equal(allreduce(jnp.ones(3), Adasum), np.ones(3))  # no refused call was sent


@pytest.mark.ranks(3)
def test_three_ranks_are_refused_but_a_set_of_two_works(world) -> None:
    x = jnp.ones(3)
    message = "op=Adasum needs a power of two of ranks, this process set has 3"
    with raises(ValueError, f"ringjax.allreduce: {message}"):
        allreduce(x, Adasum)
    tx = ringjax.allreduce_grads(Adasum)
    with raises(ValueError, f"ringjax.allreduce_grads: {message}"):
        tx.update(x, tx.init(x))
    pair = ringjax.add_process_set([0, 2])
    try:
        if world.rank != 1:
            out = allreduce(x * (world.rank + 1), Adasum, process_set=pair)
            close(out, [np.ones(3), 3 * np.ones(3)])
    finally:
        ringjax.remove_process_set(pair)
