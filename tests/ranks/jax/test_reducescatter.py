"""ringjax.reducescatter: each rank receives its rows of the reduction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.draws import draw
from support.stacked import check_derivatives, draw_all, equal, raises

import ringjax
from ringjax import Average, Compression, Max, Min, Product, Sum, reducescatter

# Three ranks run all code of this layer. Tests that need other numbers have a marker.
pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.ranks(3),
    pytest.mark.launch("collectives"),
]


def rows(total: int, rank: int, size: int) -> slice:
    """Returns the rows of `rank`. The first ranks have the remainder."""
    bounds = np.cumsum([0, *(total // size + (r < total % size) for r in range(size))])
    return slice(int(bounds[rank]), int(bounds[rank + 1]))


@pytest.mark.ranks(1, 2, 3)
def test_rows_of_a_sum(world) -> None:
    stacks = draw_all(world.size, (7, 3), ("bool", "bfloat16", "complex128"))
    mine = rows(7, world.rank, world.size)
    for f in (reducescatter, jax.jit(reducescatter, static_argnums=1)):
        for dtype, out in f({d: x[world.rank] for d, x in stacks.items()}, Sum).items():
            xs = stacks[dtype]
            total = np.any(xs, axis=0) if dtype == "bool" else sum(xs[1:], xs[0])
            equal(out, total[mine])


def test_average_is_the_default(world) -> None:
    xs = draw(world.size, (6,), "float64")
    mine = rows(6, world.rank, world.size)
    equal(reducescatter(xs[world.rank]), (sum(xs) / world.size)[mine], 1e-14)
    whole = draw(world.size, (6,), "int32", seed=5)
    expected = np.trunc(sum(whole) / world.size).astype("int32")[mine]
    equal(reducescatter(whole[world.rank]), expected)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("total", "rest", "op"),
    [
        (0, (3,), Sum),
        (1, (), Min),
        (2, (4,), Product),
        (3, (2, 0), Max),
        (11, (3, 1), Product),
    ],
)
def test_any_shape(world, total, rest, op) -> None:
    xs = draw(world.size, (total, *rest), "float64")
    mine = rows(total, world.rank, world.size)
    reduce = {Sum: np.sum, Min: np.min, Max: np.max, Product: np.prod}[op]
    x = jax.device_put(xs[world.rank])  # a NumPy array needs a program for each shape
    equal(reducescatter(x, op), reduce(np.stack(xs), axis=0)[mine])


def test_tree_scaling_and_compression(world) -> None:
    xs, ys = draw(world.size, (5, 2)), draw(world.size, (4,), "float64")
    out = reducescatter(
        {"x": xs[world.rank], "y": ys[world.rank]},
        Sum,
        prescale_factor=2.0,
        postscale_factor=0.25,
        compression=Compression.bf16,
    )
    equal(out["x"], sum(xs)[rows(5, world.rank, world.size)] / 2, 2e-2)
    equal(out["y"], sum(ys)[rows(4, world.rank, world.size)] / 2, 2e-2)
    pair = ringjax.grouped_reducescatter([xs[world.rank], ys[world.rank]], Max)
    equal(pair[1], np.max(ys, axis=0)[rows(4, world.rank, world.size)])


def test_vmap(world) -> None:
    xs = draw(world.size, (2, 5, 3), "float64")
    mine = rows(5, world.rank, world.size)
    f = jax.vmap(lambda x: reducescatter(x, Sum), in_axes=2)
    equal(f(xs[world.rank].swapaxes(0, 1)), sum(xs).transpose(2, 1, 0)[:, mine])


@pytest.mark.parametrize("op", [Average, Sum, Min, Max, Product])
def test_derivatives(world, op) -> None:
    reduce = {Sum: jnp.sum, Average: jnp.mean, Min: jnp.min, Max: jnp.max}.get(
        op, jnp.prod
    )

    def model(xs):
        y = 0.5 * reduce(-2.0 * jnp.stack(xs), axis=0)
        return [y[rows(len(y), r, len(xs))] for r in range(len(xs))]

    check_derivatives(
        world.rank,
        lambda x: reducescatter(x, op, prescale_factor=-2.0, postscale_factor=0.5),
        model,
        draw(world.size, (7, 4), "float64", seed=2),
    )


def test_bad_arguments(world) -> None:
    with raises(ValueError, "ringjax.reducescatter", "`tensor` has shape ()"):
        reducescatter(1.0)
    with raises(TypeError, "ringjax.reducescatter", "op=Average", "bool"):
        reducescatter(np.ones(3, bool))
    with raises(
        ValueError, "ringjax.grouped_reducescatter", "`tensor` '1' has shape ()"
    ):
        ringjax.grouped_reducescatter([np.ones(3), 2])


@pytest.mark.ranks(2, 3)
def test_ranks_that_disagree_all_raise(world) -> None:
    with raises(jax.errors.JaxRuntimeError, "RINGJAX[", "reducescatter"):
        jax.block_until_ready(reducescatter(jnp.ones(6 + world.rank)))
    with raises(jax.errors.JaxRuntimeError, "RINGJAX[", "reducescatter"):
        jax.block_until_ready(reducescatter(jnp.ones(6), Min if world.rank else Max))
    total = reducescatter(jnp.ones(world.size), Sum)
    equal(total, np.full(1, float(world.size)))
