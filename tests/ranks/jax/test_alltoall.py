"""ringjax.alltoall: the result is the transpose of the table of sent parts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.draws import draw
from support.stacked import check_derivatives, draw_all, equal, raises

import ringjax
from ringjax import alltoall

# Three ranks run all code of this layer. Tests that need other numbers have a marker.
pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.ranks(3),
    pytest.mark.launch("collectives"),
]


def oracle(xs: Any, table: np.ndarray, rank: int, join: Any = np.concatenate) -> Any:
    """The rows that `rank` receives if rank s sends table[s, r] rows to rank r."""
    starts = np.concatenate([np.zeros((len(xs), 1), int), table.cumsum(1)], axis=1)
    return join([x[starts[s, rank] : starts[s, rank + 1]] for s, x in enumerate(xs)])


def splits(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4, (size, size))


@pytest.mark.ranks(1, 2, 3)
def test_equal_parts(world) -> None:
    shape = (2 * world.size, 3)
    xs = draw_all(world.size, shape, ("bool", "bfloat16", "complex128"))
    table = np.full((world.size, world.size), 2)
    for f in (alltoall, jax.jit(alltoall)):
        for dtype, out in f({d: x[world.rank] for d, x in xs.items()}).items():
            equal(out, oracle(xs[dtype], table, world.rank))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("everyone", "rest"),
    [
        (np.zeros((3, 3), int), (3,)),
        (np.diag([2, 0, 1]), ()),
        (splits(3, 0), (2, 0)),
        (splits(3, 1), (4, 1)),
    ],
)
def test_splits(world, everyone, rest) -> None:
    table = everyone[: world.size, : world.size]
    xs = draw(world.size, lambda r: (int(table[r].sum()), *rest), "float32")
    x = jax.device_put(xs[world.rank])
    out, received = alltoall(x, splits=table[world.rank])
    equal(out, oracle(xs, table, world.rank))
    equal(received, table[:, world.rank].astype(np.int32))


@pytest.mark.ranks(1, 3)
def test_splits_while_tracing(world) -> None:
    table = splits(world.size, 4) + 1
    sent, received = tuple(table[world.rank]), list(table[:, world.rank])
    xs = draw(world.size, lambda r: (int(table[r].sum()), 2), "float64")

    def f(x):
        return alltoall(x, splits=sent, received_splits=received)

    for call in (f, jax.jit(f)):
        out, rows = call(xs[world.rank])
        equal(out, oracle(xs, table, world.rank))
        equal(rows, table[:, world.rank].astype(np.int32))
    with raises(ValueError, "ringjax.alltoall", "`received_splits` is missing", "jit"):
        jax.jit(lambda x: alltoall(x, splits=sent))(xs[world.rank])


def test_trees_and_groups(world) -> None:
    xs, ys = draw(world.size, (world.size, 3)), draw(world.size, (world.size,), "int8")
    table = np.ones((world.size, world.size), int)
    out = alltoall({"x": xs[world.rank], "y": ys[world.rank]})
    equal(out["x"], oracle(xs, table, world.rank))
    pair, rows = ringjax.grouped_alltoall(
        [xs[world.rank], ys[world.rank]], splits=[1] * world.size
    )
    equal(pair[1], oracle(ys, table, world.rank))
    assert rows.tolist() == [1] * world.size


def test_vmap(world) -> None:
    xs = draw(world.size, (3, world.size, 2), "float64")
    table = np.ones((world.size, world.size), int)
    expected = [oracle([x[i] for x in xs], table, world.rank) for i in range(3)]
    equal(jax.vmap(alltoall)(xs[world.rank]), np.stack(expected))


def test_derivatives(world) -> None:
    table = splits(world.size, 9) + 1

    def model(xs):
        return [oracle(xs, table, r, jnp.concatenate) for r in range(len(xs))]

    check_derivatives(
        world.rank,
        lambda x: alltoall(
            x, splits=table[world.rank], received_splits=table[:, world.rank]
        )[0],
        model,
        draw(world.size, lambda r: (int(table[r].sum()), 2), "float64"),
    )


@pytest.mark.ranks(1, 3)
def test_bad_arguments(world) -> None:
    size = world.size
    with raises(ValueError, "ringjax.alltoall", "`tensor` has shape ()"):
        alltoall(1.0)
    if size > 1:
        with raises(ValueError, "`tensor` has", f"{size + 1} rows", f"{size} ranks"):
            alltoall(np.ones((size + 1, 2)))
    with raises(ValueError, "`splits` is", "together", "has 7 rows (shape (7,))"):
        alltoall(np.ones(7), splits=[1] * size)
    with raises(ValueError, "`splits` is", f"expected {size} non-negative row counts"):
        alltoall(np.ones(size + 1), splits=[1] * (size + 1))
    with raises(ValueError, "`splits` is", "non-negative"):
        alltoall(np.ones(size), splits=[-1] + [1] * (size - 1))
    with raises(TypeError, "`splits` must be integers", "float64"):
        alltoall(np.ones(size), splits=np.ones(size))
    with raises(TypeError, "`splits` must be integers", "traced"):
        jax.jit(alltoall)(np.ones(size), jnp.ones(size, int))
    with raises(ValueError, "`received_splits` is [1]", "`splits` is not given"):
        alltoall(np.ones(size), received_splits=[1])


@pytest.mark.ranks(2, 3)
def test_splits_that_do_not_fit_raise_on_all_ranks(world) -> None:
    wrong = [1] * world.size
    if world.rank == 1:
        wrong[0] = 2
    x = jnp.ones(world.size)
    with raises(ValueError, "rank 1 passes `received_splits` [2, 1", "[1, 1"):
        alltoall(x, splits=[1] * world.size, received_splits=wrong)
    f = jax.jit(lambda x: alltoall(x, [1] * world.size, received_splits=wrong)[0])
    with raises(jax.errors.JaxRuntimeError, "RINGJAX[", "alltoall"):
        jax.block_until_ready(f(x))
    equal(alltoall(x), np.ones(world.size))
