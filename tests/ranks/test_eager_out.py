"""The argument `out` of eager operations, the array that receives the result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.rank_worker import World

import ringjax
from ringjax import eager
from ringjax.errors import Mismatch

# Three ranks run all code of this layer. Tests that need other numbers have a marker.
pytestmark = [pytest.mark.ranks(3), pytest.mark.launch("torch")]


def _rows(rank: int, n: int, dtype: Any = np.float32) -> Any:
    return np.arange(n * 3).reshape(n, 3).astype(dtype) + rank


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("dtype", "length"),
    [("float32", 0), ("complex64", 1), ("int8", 1000), ("float16", 100_000)],
)
def test_reductions(world: World, dtype: str, length: int) -> None:
    rank, size = world.rank, world.size
    x = np.full((length, 2), rank + 1, dtype)
    total = size * (size + 1) // 2
    out = np.zeros_like(x)
    assert eager.allreduce(x, ringjax.Sum, name="r", out=out) is out
    assert (out == total).all() and (x == rank + 1).all()
    assert eager.allreduce(x, ringjax.Sum, name="r", out=x) is x
    assert (x == total).all()
    later = eager.allreduce_async(x, ringjax.Sum, name="r", out=out)
    assert eager.synchronize(later) is out
    assert (out == np.asarray(total, dtype) * np.asarray(size, dtype)).all()


@pytest.mark.parametrize("length", [1, 2, 7, 50_000])
def test_reducescatter(world: World, length: int) -> None:
    rank, size = world.rank, world.size
    x = _rows(0, length)
    own = length // size + (rank < length % size)
    first = rank * (length // size) + min(rank, length % size)
    out = np.zeros((own, 3), np.float32)
    assert eager.reducescatter(x, ringjax.Sum, name="s", out=out) is out
    assert (out == size * x[first : first + own]).all()
    fresh = eager.reducescatter(x, ringjax.Sum, name="s")
    assert (fresh == out).all() and fresh.dtype == out.dtype
    grouped = eager.grouped_reducescatter([x, x], ringjax.Max, out=[out, fresh])
    assert grouped[0] is out and grouped[1] is fresh
    assert (out == x[first : first + own]).all() and (fresh == out).all()


def test_broadcast(world: World) -> None:
    rank, size = world.rank, world.size
    root = size - 1
    for length in (0, 5, 200_000):
        x = np.full(length, rank, np.int32)
        out = np.full(length, -1, np.int32)
        assert eager.broadcast(x, root, name="b", out=out) is out
        assert (out == root).all() and (x == rank).all()
        assert eager.broadcast(x, root, name="b", out=x) is x
        assert (x == root).all()


@pytest.mark.parametrize("each", [0, 1, 4, 30_000])
def test_allgather_and_alltoall(world: World, each: int) -> None:
    rank, size = world.rank, world.size
    x = _rows(10 * rank, each)
    out = np.empty((each * size, 3), np.float32)
    expected = np.concatenate([_rows(10 * r, each) for r in range(size)])
    assert eager.allgather(x, name="g", out=out) is out
    assert (out == expected).all()
    out[:] = -1
    assert eager.synchronize(eager.allgather_async(x, name="g", out=out)) is out
    assert (out == expected).all()
    given = np.concatenate([_rows(10 * rank + r, each) for r in range(size)])
    assert eager.alltoall(given, name="a", out=out) is out
    expected = np.concatenate([_rows(10 * r + rank, each) for r in range(size)])
    assert (out == expected).all()
    rows, received = eager.alltoall(given, [each] * size, name="a", out=out)
    assert rows is out and received.tolist() == [each] * size


def test_out_must_have_the_rows_of_all_ranks(world: World) -> None:
    rank, size = world.rank, world.size
    x = _rows(rank, rank + 1)
    total = size * (size + 1) // 2
    out = np.empty((total, 3), np.float32)
    assert eager.grouped_allgather([x, x], name="g", out=[out, out.copy()])[0] is out
    expected = np.concatenate([_rows(r, r + 1) for r in range(size)])
    assert (out == expected).all()
    # Only the rank with the wrong `out` raises. The others receive their results.
    if rank == 0:
        with pytest.raises(ValueError, match=rf"result(?: has)? {total} rows|{total}"):
            eager.allgather(x, name="g", out=np.empty((total + 1, 3), np.float32))
    else:
        assert (eager.allgather(x, name="g", out=out) == expected).all()
    with pytest.raises(ValueError, match="out has 0 rows, and the result"):
        eager.grouped_allgather([x], name="g", out=[out[:0]])
    assert (eager.allgather(x, name="g", out=out) == expected).all()


def test_tensors_of_pytorch(world: World) -> None:
    rank, size = world.rank, world.size
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((10,), rank + 1.0, dtype=dtype)
        out = torch.zeros_like(x)
        assert eager.allreduce(x, ringjax.Max, name="t", out=out) is out
        assert (out == size).all()
    out = np.zeros(3, np.float32)
    assert eager.allreduce(torch.ones(3), ringjax.Sum, name="t", out=out) is out
    assert (out == size).all()


def test_an_unusable_out_is_refused_before_sending(
    world: World,
) -> None:
    x = np.arange(6, dtype=np.float32)
    frozen = x.copy()
    frozen.flags.writeable = False
    both = np.zeros(12, np.float32)
    cases: list[tuple[type[Exception], str, Any, Any]] = [
        (ValueError, r"float64\[6\], expected float32\[6\]", x, np.zeros(6)),
        (ValueError, r"float32\[5\], expected float32\[6\]", x, x[:5].copy()),
        (ValueError, r"float32\[6,1\], expected float32\[6\]", x, x[:, None].copy()),
        (ValueError, r"float32\[6\], expected float32\[6,1\]", x[:, None], x.copy()),
        (ValueError, "contiguous and writeable", x, np.zeros(12, np.float32)[::2]),
        (ValueError, "contiguous and writeable", x, frozen),
        (ValueError, "shares memory", both[:6], both[3:9]),
        (TypeError, "out must be a numpy array", x, [0.0] * 6),
        (TypeError, "out must be a numpy array", 1.0, 2.0),
    ]
    for kind, text, tensor, out in cases:
        with pytest.raises(kind, match=text):
            eager.allreduce(tensor, name="bad", out=out)
        with pytest.raises(kind, match=text):
            eager.allreduce_async(tensor, name="bad", out=out)
        with pytest.raises(kind, match=text):
            eager.broadcast(tensor, 0, name="bad", out=out)
    many = np.ones((world.size, 2))
    with pytest.raises(
        ValueError, match=r"out is float64\[2,2\], expected float64\[1,2\]"
    ):
        eager.reducescatter(many, out=np.ones((2, 2)))
    with pytest.raises(ValueError, match="shares memory"):
        eager.allgather(x, name="bad", out=x[:])
    with pytest.raises(ValueError, match="a list of 2 arrays"):
        eager.grouped_allreduce([x, x], out=x)
    with pytest.raises(TypeError, match="name must be a str"):
        eager.allreduce(x, name=3, out=x)  # type: ignore[arg-type]
    eager.barrier()
    assert (eager.allreduce(np.ones(3), name="bad") == 1).all()


def test_only_some_ranks_may_pass_out(world: World) -> None:
    rank, size = world.rank, world.size
    x = np.full(300, rank + 1.0)
    out = np.zeros(300) if rank == 0 else None
    result = eager.allreduce(x, ringjax.Sum, name="some", out=out)
    assert (result == size * (size + 1) / 2).all()
    assert rank > 0 or result is out
    with pytest.raises(Mismatch):
        eager.allreduce(np.ones(3 + rank), name="other", out=np.ones(3 + rank))
    assert (eager.allreduce(x, ringjax.Min, name="some") == 1).all()
