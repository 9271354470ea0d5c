"""Every named operation on every dtype, on NumPy arrays, once for all frameworks.

A framework only adds the conversion of its tensors, which its own tests run once for
each dtype. The expected results are computed by NumPy from the inputs of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.rank_worker import World

import ringjax
from ringjax import eager
from ringjax.errors import RingjaxError

# Five ranks, unlike three, make trees of two levels, and are one rank more than a power
# of two. The tests of the frameworks do not run on five ranks.
pytestmark = [pytest.mark.ranks(1, 2, 3, 5), pytest.mark.launch("core")]

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
HALVES = ("float16", ml_dtypes.bfloat16)
FLOATS = (*HALVES, "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 0, 3), (7, 2, 4)]
LONG = 300_001  # elements: long enough for CMA and for several segments
UNDEFINED = {"Average": ("bool",), "Min": COMPLEX, "Max": COMPLEX}


def draw(rank: int, shape: Sequence[int], dtype: Any) -> Any:
    """Returns the input of `rank`: small integers, so that all sums are exact."""
    values = np.random.default_rng([rank, *shape]).integers(0, 4, shape)
    return np.asarray(values).astype(dtype)


def reduced(op: str, xs: Sequence[Any]) -> Any:
    """Reduces the inputs of all ranks by NumPy, in rank order and in their dtype."""
    if op == "Average":
        total = reduced("Sum", xs)
        if xs[0].dtype.kind in "iu":
            return np.trunc(total / len(xs)).astype(total.dtype)
        wide = "complex128" if total.dtype.kind == "c" else "float64"
        return (total.astype(wide) / len(xs)).astype(total.dtype)
    combine = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}
    out = xs[0]
    for x in xs[1:]:
        out = combine.get(op, np.add)(out, x).astype(out.dtype)
    return out


def assert_equal(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    assert type(actual) is type(expected) or actual.shape == ()
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    if tolerance:
        wide = [np.asarray(x).astype("complex128") for x in (actual, expected)]
        np.testing.assert_allclose(*wide, rtol=tolerance)
    else:
        np.testing.assert_array_equal(actual, expected)


def check(
    world: World,
    start: Callable[..., eager.Handle],
    expected: Callable[[list[Any]], Any],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[Any] = DTYPES,
    tolerance: Callable[[Any], float] = lambda dtype: 0.0,
) -> None:
    """Runs an operation on all shapes and dtypes at once, then on one after the other.

    Operations that are submitted together may be fused into one call.
    """
    kinds = [(shape, np.dtype(dtype)) for dtype in dtypes for shape in shapes]

    def begin(kind: tuple[Sequence[int], Any]) -> tuple[eager.Handle, Any]:
        x = draw(world.rank, *kind)
        return start(x, name=f"{kind}"), x

    def end(kind: tuple[Sequence[int], Any], handle: eager.Handle, x: Any) -> None:
        xs = [draw(rank, *kind) for rank in range(world.size)]
        assert_equal(eager.synchronize(handle), expected(xs), tolerance(kind[1]))
        assert_equal(x, xs[world.rank])

    begun = [begin(kind) for kind in kinds]
    for kind, (handle, x) in zip(kinds, begun, strict=True):
        end(kind, handle, x)
    for dtype in dtypes:
        kind = (shapes[-1], np.dtype(dtype))
        end(kind, *begin(kind))


@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product"])
def test_allreduce(world: World, op: str) -> None:
    undefined = UNDEFINED.get(op, ())
    check(
        world,
        lambda x, name: eager.allreduce_async(x, getattr(ringjax, op), name=name),
        lambda xs: np.asarray(reduced(op, xs)),
        [*SHAPES, (4099,)],
        [dtype for dtype in DTYPES if dtype not in undefined],
        # The factor of an average is rounded once, in the dtype of the array.
        lambda dtype: 0.0 if op != "Average" else 1e-2 if dtype.itemsize == 2 else 1e-6,
    )


@pytest.mark.parametrize("op", UNDEFINED)
def test_undefined_operations_are_refused(world: World, op: str) -> None:
    for dtype in UNDEFINED[op]:
        with pytest.raises(RingjaxError, match=f"op={op.upper()} has no"):
            eager.allreduce(np.zeros(3, dtype), getattr(ringjax, op), name="refused")
    assert eager.allreduce(1, ringjax.Sum) == world.size


def test_synchronous_calls(world: World) -> None:
    """Synchronous calls on NumPy arrays have their own code path in the binding."""
    for dtype in DTYPES:
        xs = [draw(r, (3, 2), dtype) for r in range(world.size)]
        x = xs[world.rank]
        assert_equal(eager.allreduce(x, ringjax.Sum, name="r"), reduced("Sum", xs))
        assert_equal(eager.allgather(x, name="g"), np.concatenate(xs))
        assert_equal(eager.broadcast(x, world.size - 1, name="b"), xs[-1])
        part = np.array_split(reduced("Sum", xs), world.size)[world.rank]
        assert_equal(eager.reducescatter(x, ringjax.Sum, name="s"), part)


@pytest.mark.parametrize("op", ["Min", "Max"])
def test_the_limits_of_every_integer_dtype(world: World, op: str) -> None:
    """Signed and unsigned dtypes of one width must be compared differently."""
    for dtype in INTEGERS:
        limits = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 1], dtype)
        xs = [np.roll(limits, rank) for rank in range(world.size)]
        call = xs[world.rank], getattr(ringjax, op)
        assert_equal(eager.allreduce(*call, name=dtype), reduced(op, xs))
        assert_equal(eager.allreduce_async(*call, name=dtype).wait(), reduced(op, xs))


def test_reducescatter(world: World) -> None:
    check(
        world,
        lambda x, name: eager.reducescatter_async(x, ringjax.Sum, name=name),
        lambda xs: np.array_split(reduced("Sum", xs), world.size)[world.rank],
        SHAPES[1:],
    )


def test_allgather(world: World) -> None:
    check(
        world,
        lambda x, name: eager.allgather_async(x, name=name),
        np.concatenate,
        SHAPES[1:],
    )


def test_allgather_of_rows_that_differ(world: World) -> None:
    for first in ((0,) * 5, (7, 0, 1, 0, 4), (1, 2, 3, 4, 5)):
        for rest in ((), (3,), (2, 0)):
            rows = [draw(r, (first[r], *rest), "int16") for r in range(world.size)]
            found = eager.allgather(rows[world.rank], name="rows")
            assert_equal(found, np.concatenate(rows))


def test_broadcast(world: World) -> None:
    for root in range(world.size):
        check(
            world,
            lambda x, name, root=root: eager.broadcast_async(x, root, name=name),
            lambda xs, root=root: xs[root],
            SHAPES,
            DTYPES if root == world.size - 1 else ("float32",),
        )


def test_alltoall(world: World) -> None:
    """Without splits, every rank receives an equal part."""
    check(
        world,
        lambda x, name: eager.alltoall_async(x, name=name),
        lambda xs: np.concatenate([np.split(x, world.size)[world.rank] for x in xs]),
        [(0,), (world.size,), (2 * world.size, 3), (world.size, 0, 3)],
    )


def test_alltoall_with_splits(world: World) -> None:
    for seed in range(4):
        table = np.random.default_rng(seed).integers(0, seed + 1, (world.size,) * 2)
        xs = [draw(r, (table[r].sum(), 2), "float32") for r in range(world.size)]
        found, received = eager.alltoall(xs[world.rank], table[world.rank], name="s")
        parts = [
            np.split(x, np.cumsum(row)[:-1])[world.rank]
            for x, row in zip(xs, table, strict=True)
        ]
        assert_equal(found, np.concatenate(parts))
        assert received.tolist() == table[:, world.rank].tolist()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_long_tensors(world: World, dtype: str) -> None:
    xs = [draw(r, (LONG, 2), dtype) for r in range(world.size)]
    x = xs[world.rank]
    total = reduced("Sum", xs)
    out = np.empty((LONG * world.size, 2), dtype)
    for turn in range(2):  # CMA is used from the second message of a link on
        assert_equal(eager.allreduce(x, ringjax.Sum, name="r"), total)
        part = np.array_split(total, world.size)[world.rank]
        assert_equal(eager.reducescatter(x, ringjax.Sum, name="s"), part)
        assert_equal(eager.allgather(x, name="g"), np.concatenate(xs))
        assert_equal(eager.allgather(x, name="o", out=out), np.concatenate(xs))
        root = (world.size - 1) * turn
        assert_equal(eager.broadcast(x, root, name="b"), xs[root])
        rows = np.concatenate(xs)  # equal on all ranks
        mine = np.concatenate([xs[world.rank]] * world.size)
        assert_equal(eager.alltoall(rows, name="a"), mine)
    assert_equal(x, draw(world.rank, (LONG, 2), dtype))


@pytest.mark.ranks(2, 4)
def test_adasum(world: World) -> None:
    """Adasum combines every tensor separately, in pairs, on 2**n ranks."""

    def combined(xs: Sequence[Any]) -> Any:
        if len(xs) == 1:
            return xs[0].astype("float64")
        half = len(xs) // 2
        a, b = combined(xs[:half]), combined(xs[half:])
        dot, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
        left = 1 - dot / (2 * aa) if aa else 1
        return left * a + (1 - dot / (2 * bb) if bb else 1) * b

    check(
        world,
        lambda x, name: eager.allreduce_async(x, ringjax.Adasum, name=name),
        lambda xs: np.asarray(combined(xs).astype(xs[0].dtype)),
        [*SHAPES, (5003,)],
        FLOATS,
        lambda dtype: 4e-2 if dtype.itemsize == 2 else 1e-5,
    )
