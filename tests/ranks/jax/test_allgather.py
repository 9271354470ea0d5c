"""ringjax.allgather against numpy.concatenate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.draws import draw
from support.stacked import check_derivatives, draw_all, equal, raises

import ringjax
from ringjax import allgather

# Three ranks run all code of this layer. Tests that need other numbers have a marker.
pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.ranks(3),
    pytest.mark.launch("collectives"),
]


@pytest.mark.ranks(1, 2, 3)
def test_equal_rows(world) -> None:
    xs = draw_all(world.size, (3, 5), ("bool", "bfloat16", "complex128"))
    for f in (allgather, jax.jit(allgather)):
        for dtype, out in f({d: x[world.rank] for d, x in xs.items()}).items():
            equal(out, np.concatenate(xs[dtype]))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("rows", "rest"),
    [((0, 0, 0), ()), ((7, 0, 1), (4,)), ((0, 2, 3), (2, 0)), ((1, 6, 0), (3, 1, 2))],
)
def test_different_numbers_of_rows(world, rows, rest) -> None:
    xs = draw(world.size, lambda r: (rows[r], *rest), "float32")
    ns = draw(world.size, lambda r: (rows[-1 - r],), "int16")
    out = allgather(jax.device_put({"x": xs[world.rank], "n": ns[world.rank]}))
    equal(out["x"], np.concatenate(xs))
    equal(out["n"], np.concatenate(ns))


def test_scalars_are_rows(world) -> None:
    equal(allgather(np.float32(world.rank)), np.arange(world.size, dtype=np.float32))
    out = ringjax.grouped_allgather([world.rank, np.ones((1, 2))])
    equal(out[1], np.ones((world.size, 2)))
    assert out[0].tolist() == list(range(world.size))


def test_vmap(world) -> None:
    xs = draw(world.size, (4, 2, 3), "float64")
    for axis in range(3):
        expected = np.stack(
            [
                np.concatenate(rows)
                for rows in zip(*(np.moveaxis(x, axis, 0) for x in xs), strict=True)
            ]
        )
        equal(jax.vmap(allgather, in_axes=axis)(xs[world.rank]), expected)
        equal(jax.jit(jax.vmap(allgather, in_axes=axis))(xs[world.rank]), expected)


def test_scan(world) -> None:
    def body(carry, x):
        return carry, jnp.sum(allgather(x)[:, None] * carry[None])

    _, out = jax.jit(lambda xs: jax.lax.scan(body, jnp.ones(2), xs))(jnp.ones((5, 3)))
    equal(out, np.full(5, 6.0 * world.size))


def test_derivatives(world) -> None:
    def model(xs):
        return [jnp.concatenate(xs)] * len(xs)

    check_derivatives(world.rank, allgather, model, draw(world.size, (4, 3), "float64"))


@pytest.mark.ranks(1, 3)
def test_derivatives_with_different_numbers_of_rows(world) -> None:
    xs = draw(world.size, lambda r: (r + 1, 2), "float64")
    weights = np.arange(1.0, 1.0 + sum(len(x) for x in xs))[:, None]

    def loss(x):  # not under jit, so ranks exchange their numbers of rows
        return jnp.sum(weights * allgather(x) ** 2) * (world.rank + 1)

    start = sum(len(x) for x in xs[: world.rank])
    mine = weights[start : start + world.rank + 1]
    total = sum(r + 1 for r in range(world.size))
    expected = 2 * mine * xs[world.rank] * total
    equal(jax.grad(loss)(jnp.asarray(xs[world.rank])), expected, 1e-12)


@pytest.mark.ranks(2, 3)
def test_different_traced_rows_raise_on_all_ranks(world) -> None:
    f = jax.jit(lambda x: allgather(x, name="batch"))
    with raises(jax.errors.JaxRuntimeError, "RINGJAX[", "allgather 'batch'"):
        jax.block_until_ready(f(jnp.ones(2 + world.rank)))
    equal(f(jnp.ones(2)), np.ones(2 * world.size))


@pytest.mark.ranks(2, 3)
def test_other_dimensions_that_differ_raise_on_all_ranks(world) -> None:
    with raises(jax.errors.JaxRuntimeError, "RINGJAX[", "allgather"):
        jax.block_until_ready(allgather(jnp.ones((2, 2 + world.rank))))
    with raises(jax.errors.JaxRuntimeError, "RINGJAX[", "allgather"):
        jax.block_until_ready(
            allgather(jnp.ones(2, "int32" if world.rank else "float32"))
        )
    equal(allgather(jnp.ones(1)), np.ones(world.size))
