"""ringjax.torch: every operation in every variant, compared with PyTorch."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from support.stacked import raises

import ringjax.torch as hvd
from ringjax.eager.dtypes import NUMBERS
from ringjax.errors import Mismatch

# Three ranks run all code of this layer. Tests that need other numbers have a marker.
pytestmark = [pytest.mark.ranks(3), pytest.mark.launch("torch")]

DTYPES = tuple(getattr(torch, name) for name in NUMBERS)
SHAPES = [(), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 4)]


def draw(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """Returns the input of `rank`: small integers, so that all dtypes add exactly."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def every(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    return torch.stack([draw(r, shape, dtype) for r in range(size)])


def total(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    return every(size, shape, dtype).sum(0).to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected)


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # torch.testing.assert_close would import many modules, which is slow.
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips(world, dtype: torch.dtype) -> None:
    """allreduce writes into memory of PyTorch, allgather returns memory of the core."""
    for shape in ((), (2, 3)):
        x = draw(world.rank, shape, dtype)
        same(hvd.allreduce(x, op=hvd.Sum), total(world.size, shape, dtype))
    same(hvd.allgather(x), torch.cat(list(every(world.size, shape, dtype))))
    assert hvd.broadcast_(x, 0) is x
    same(x, draw(0, shape, dtype))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_allreduce_in_all_variants(world, shape: tuple[int, ...]) -> None:
    x, expected = draw(world.rank, shape), total(world.size, shape)
    before = x.clone()
    same(hvd.allreduce(x, op=hvd.Sum), expected)
    handle = hvd.allreduce_async(x, op=hvd.Sum)
    same(hvd.synchronize(handle), expected)
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is None
    same(x, before)
    assert hvd.allreduce_(x, op=hvd.Sum) is x
    same(x, expected)
    y = before.clone()
    assert hvd.synchronize(hvd.allreduce_async_(y, op=hvd.Sum)) is y
    same(y, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_other_operations_in_all_variants(world, shape: tuple[int, ...]) -> None:
    rank, size = world.rank, world.size
    if shape:
        x, rows = draw(rank, shape), torch.cat(list(every(size, shape)))
        same(hvd.allgather(x), rows)
        part = hvd.reducescatter(x, op=hvd.Sum)
        same(part, torch.tensor_split(total(size, shape), size)[rank])
        same(hvd.alltoall(torch.cat([x] * size)), rows)
    for root in range(size):
        x = draw(rank, shape)
        same(hvd.broadcast(x, root), draw(root, shape))
        same(x, draw(rank, shape))
        assert hvd.broadcast_(x, root) is x
        same(x, draw(root, shape))
        handle = hvd.broadcast_async(draw(rank, shape), root, "x")
        same(hvd.synchronize(handle), draw(root, shape))
        y = draw(rank, shape)
        assert hvd.synchronize(hvd.broadcast_async_(y, root, name="x")) is y
        same(y, draw(root, shape))


def test_ops_and_factors(world) -> None:
    size, shape = world.size, (4, 3)
    x, xs = draw(world.rank, shape), every(size, shape)
    same(hvd.allreduce(x, op=hvd.Min), xs.amin(0))
    same(hvd.allreduce(x, op=hvd.Max), xs.amax(0))
    same(hvd.allreduce(x, op=hvd.Product), xs.prod(0))
    near(hvd.allreduce(x), xs.mean(0))
    out = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3)
    near(out, 1.5 * xs.sum(0))
    whole = xs.mean(0) * 2
    part = hvd.reducescatter(x, prescale_factor=2.0)
    near(part, torch.tensor_split(whole, size)[world.rank])
    # The core multiplies integers in float64 and truncates the result.
    n = draw(world.rank, shape, torch.int32)
    scaled = (0.7 * every(size, shape, torch.float64)).trunc().sum(0)
    same(hvd.allreduce(n, op=hvd.Sum, prescale_factor=0.7), scaled.int())
    mean = every(size, shape, torch.float64).mean(0).trunc().int()
    same(hvd.allreduce(n), mean)


def test_average_is_deprecated(world) -> None:
    x = draw(world.rank, (3,))
    with pytest.warns(DeprecationWarning, match="op=Average"):
        near(hvd.allreduce(x, True), every(world.size, (3,)).mean(0))
    with pytest.warns(DeprecationWarning, match="op=Sum"):
        same(hvd.allreduce_(x.clone(), average=False), total(world.size, (3,)))
    with raises(ValueError, "`op` supersedes `average`"):
        hvd.allreduce(x, average=True, op=hvd.Sum)


def test_groups(world) -> None:
    size, shapes = world.size, [(3,), (2, 2), (4, 1)]
    dtypes = [torch.float32, torch.int64, torch.bfloat16]
    pairs = list(zip(shapes, dtypes, strict=True))
    xs = [draw(world.rank, s, d) for s, d in pairs]
    sums = [total(size, s, d) for s, d in pairs]

    def check(outs: Any, kind: type, expected: Any) -> None:
        assert type(outs) is kind
        for out, value in zip(outs, expected, strict=True):
            same(out, value)

    check(hvd.grouped_allreduce(xs, op=hvd.Sum, name="g"), list, sums)
    handle = hvd.grouped_allreduce_async(xs, op=hvd.Sum, name="g")
    check(hvd.synchronize(handle), tuple, sums)
    rows = [torch.cat(list(every(size, s, d))) for s, d in pairs]
    check(hvd.grouped_allgather(xs, name="g"), tuple, rows)
    check(hvd.synchronize(hvd.grouped_allgather_async(xs)), tuple, rows)
    parts = [torch.tensor_split(s, size)[world.rank] for s in sums]
    check(hvd.grouped_reducescatter(xs, "g", op=hvd.Sum), list, parts)
    handle = hvd.grouped_reducescatter_async(xs, op=hvd.Sum)
    check(hvd.synchronize(handle), tuple, parts)
    outs = hvd.grouped_allreduce_(xs, op=hvd.Sum)
    assert all(out is x for out, x in zip(outs, xs, strict=True))
    check(outs, tuple, sums)
    ys = [draw(world.rank, s, d) for s, d in pairs]
    check(hvd.synchronize(hvd.grouped_allreduce_async_(ys, op=hvd.Sum)), tuple, sums)
    check(tuple(ys), tuple, sums)


def test_memory_that_is_not_contiguous(world) -> None:
    base = draw(world.rank, (4, 6))
    columns = base[:, ::2]
    expected = total(world.size, (4, 6))[:, ::2]
    same(hvd.allreduce(columns, op=hvd.Sum), expected)
    same(hvd.allreduce_(columns, op=hvd.Sum), expected)
    same(base[:, 1::2], draw(world.rank, (4, 6))[:, 1::2])
    same(hvd.broadcast_(base.t(), 0), base.t())
    # The memory of lazily conjugated and negated tensors has the original values.
    z = draw(world.rank, (2,), torch.complex64) * 1j
    same(hvd.allreduce(z.conj(), op=hvd.Sum), -total(world.size, (2,), z.dtype) * 1j)
    minus = z[:1].conj().imag
    assert minus.is_neg()
    same(hvd.allreduce(minus, op=hvd.Sum), -total(world.size, (2,))[:1])


def test_uneven_rows(world) -> None:
    rank, size = world.rank, world.size
    rows = [2 * r for r in range(size)]
    xs = [draw(r, (rows[r], 3)) for r in range(size)]
    same(hvd.allgather(xs[rank], name="uneven"), torch.cat(xs))
    for n in range(2 * size + 1):
        whole = total(size, (n, 2))
        part = hvd.reducescatter(draw(rank, (n, 2)), op=hvd.Sum)
        same(part, torch.tensor_split(whole, size)[rank])


@pytest.mark.parametrize("kind", [list, torch.int32, torch.int64], ids=str)
def test_alltoall_with_splits(world, kind: Any) -> None:
    rank, size = world.rank, world.size
    # Rank r sends r + q + 1 rows to rank q.
    splits = [rank + q + 1 for q in range(size)]
    given = splits if kind is list else torch.tensor(splits, dtype=kind)
    x = torch.cat([torch.full((n, 2), 10 * rank + q) for q, n in enumerate(splits)])
    expected = torch.cat(
        [torch.full((r + rank + 1, 2), 10 * r + rank) for r in range(size)]
    )
    out, received = hvd.alltoall(x, given, name="splits")
    same(out, expected)
    same(received, torch.tensor([r + rank + 1 for r in range(size)]).int())
    out, received = hvd.synchronize(hvd.alltoall_async(x, given))
    same(out, expected)
    even = torch.arange(2 * size)
    assert isinstance(hvd.alltoall(even), torch.Tensor)
    # The handle returns both results also without `splits`, like Horovod's.
    out, received = hvd.synchronize(hvd.alltoall_async(even))
    assert received.tolist() == [2] * size
    nothing = hvd.alltoall(torch.empty(0, 2), [0] * size)
    assert nothing[0].shape == (0, 2)


def test_sparse(world) -> None:
    i = torch.tensor([[0, world.rank], [1, 2]])
    shape, values = (world.size, 3), torch.tensor([1.0, 2.0])
    x = torch.sparse_coo_tensor(i, values, shape, check_invariants=True)
    dense = torch.zeros(world.size, 3)
    for r in range(world.size):
        dense[0, 1] += 1
        dense[r, 2] += 2
    finish = hvd.sparse_allreduce_async(x, name="sparse", op=hvd.Sum)
    same(finish().to_dense(), dense)
    finish = hvd.sparse_allreduce_async(x, name="sparse", op=hvd.Average)
    same(finish().to_dense(), dense / world.size)
    with raises(TypeError, "sparse"):
        hvd.sparse_allreduce_async(dense, name="sparse", op=hvd.Sum)
    with raises(ValueError, "op is"):
        hvd.sparse_allreduce_async(x, name="sparse", op=hvd.Max)


def test_compression(world) -> None:
    compression = hvd.Compression
    for dtype in (torch.float32, torch.float64):
        x = draw(world.rank, (5,), dtype)
        for how in (compression.none, compression.fp16, compression.bf16):
            same(
                hvd.allreduce(x, op=hvd.Sum, compression=how),
                total(world.size, (5,), dtype),
            )
            (out,) = hvd.grouped_allreduce([x], op=hvd.Sum, compression=how)
            same(out, total(world.size, (5,), dtype))
    packed, context = compression.fp16.compress(torch.ones(2, dtype=torch.float64))
    assert packed.dtype == torch.float16
    assert compression.fp16.decompress(packed, context).dtype == torch.float64
    assert compression.bf16.compress(torch.ones(2))[0].dtype == torch.bfloat16
    whole = torch.ones(2, dtype=torch.int64)
    packed, context = compression.bf16.compress(whole)
    assert packed is whole
    assert compression.bf16.decompress(packed, context).dtype == torch.int64


@pytest.mark.ranks(1, 2, 3)
def test_many_operations_in_any_order(world) -> None:
    count = 200
    order = torch.randperm(
        count, generator=torch.Generator().manual_seed(world.rank)
    ).tolist()
    xs = [torch.full((i % 7 + 1,), float(world.rank)) for i in range(count)]
    handles = {i: hvd.allreduce_async_(xs[i], name=f"x{i}", op=hvd.Sum) for i in order}
    for i in range(count):
        hvd.synchronize(handles[i])
        same(xs[i], torch.full((i % 7 + 1,), float(sum(range(world.size)))))


@pytest.mark.ranks(1, 2, 3)
def test_join_with_every_operation(world) -> None:
    rank, size = world.rank, world.size
    if rank == size - 1 and size > 1:
        assert hvd.join() in range(size)
    else:
        others = range(size - 1) if size > 1 else range(1)
        x = torch.full((2 * size, 2), float(rank + 1))
        ones = sum(r + 1.0 for r in others)
        same(hvd.allreduce(x, op=hvd.Sum), torch.full_like(x, ones))
        near(hvd.allreduce(x), torch.full_like(x, ones / size))
        assert hvd.allreduce(x, op=hvd.Min).unique().tolist() == [1.0]
        assert hvd.allgather(x).shape == (2 * size * len(others), 2)
        same(hvd.broadcast(x, 0), torch.ones_like(x))
        assert hvd.reducescatter(x, op=hvd.Sum).unique().tolist() == [ones]
        out, received = hvd.alltoall(x, [2] * size)
        assert received.tolist() == [2 * (r in others) for r in range(size)]
        assert out.shape == (2 * len(others), 2)
        assert hvd.broadcast_object(rank, 0) == 0
        assert hvd.allgather_object(rank) == list(others)
        hvd.barrier()
        assert hvd.join(-1) in range(size)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


@pytest.mark.ranks(3)
def test_process_sets(world) -> None:
    pair = hvd.add_process_set(hvd.ProcessSet([0, 2]))
    x = torch.full((2,), float(world.rank))
    try:
        if world.rank == 1:
            for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter):
                with raises(ValueError, "process_set", "does not include this rank"):
                    call(x, process_set=pair)
        else:
            same(hvd.allreduce(x, process_set=pair), torch.ones(2))
            rows = torch.tensor([0.0, 0.0, 2.0, 2.0])
            same(hvd.allgather(x, process_set=pair), rows)
            same(hvd.broadcast(x, 2, process_set=pair), torch.full((2,), 2.0))
            same(hvd.alltoall(x, process_set=pair), torch.tensor([0.0, 2.0]))
            assert hvd.reducescatter(x, process_set=pair).tolist() == [1.0]
            with raises(ValueError, "root_rank is 1", "[0, 2]"):
                hvd.broadcast(x, 1, process_set=pair)
            hvd.barrier(process_set=pair)
    finally:
        hvd.remove_process_set(pair)
    with raises(ValueError, "not registered"):
        hvd.allreduce(x, process_set=pair)


@pytest.mark.ranks(2, 3)
def test_ranks_that_disagree_raise_and_continue(world) -> None:
    odd = world.rank == 1
    with raises(Mismatch, "Mismatched shapes of allreduce 'grad'", "rank 1"):
        hvd.allreduce(torch.ones(17, 2 + odd), name="grad")
    with raises(hvd.mpi_ops.HorovodInternalError, "Mismatched dtypes", "'grad'"):
        hvd.allreduce(
            torch.ones(3).to(torch.int32 if odd else torch.float32), name="grad"
        )
    with raises(RuntimeError, "Mismatched shapes of allgather"):
        hvd.allgather(torch.ones(2, 2 + odd), name="grad")
    with raises(RuntimeError, "Mismatched root ranks of broadcast 'grad'"):
        hvd.broadcast(torch.ones(3), int(odd), name="grad")
    with raises(RuntimeError, "Mismatched reduce ops of allreduce 'grad'"):
        hvd.allreduce(torch.ones(3), op=hvd.Max if odd else hvd.Sum, name="grad")
    with raises(RuntimeError, "Mismatched numbers of tensors", "'grad'"):
        hvd.grouped_allreduce([torch.ones(3)] * (1 + odd), name="grad")
    same(
        hvd.allreduce(torch.ones(3), op=hvd.Sum, name="grad"),
        torch.ones(3) * world.size,
    )


def test_unsupported_values_are_refused(world) -> None:
    x = torch.ones(3)
    with raises(TypeError, "ringjax.allreduce 'g'", "expected a torch.Tensor", "list"):
        hvd.allreduce([1.0], name="g")
    with raises(ValueError, "float8", "not supported", "shape [3]"):
        hvd.allreduce(x.to(torch.float8_e4m3fn), name="g")
    with raises(ValueError, "sparse_coo"):
        hvd.allreduce(x.to_sparse())
    with raises(ValueError, "device meta"):
        hvd.allreduce(x.to("meta"))
    for call in (hvd.allgather, hvd.reducescatter, hvd.alltoall):
        with raises(ValueError, "without dimensions"):
            call(torch.tensor(1.0))
    with raises(ValueError, "root_rank is 7"):
        hvd.broadcast(x, 7)
    with raises(TypeError, "root_rank must be an int"):
        hvd.broadcast(x, 0.0)
    for splits in ([1] * (world.size + 1), [-1] * world.size, [4] * world.size):
        with raises(ValueError, "alltoall"):
            hvd.alltoall(torch.ones(world.size), splits)
    with raises(ValueError, "splits must be integers"):
        hvd.alltoall(x, torch.ones(world.size))
    with raises(ValueError, "alltoall"):
        hvd.alltoall(torch.ones(world.size + 1))
    with raises(ValueError, "op is 11"):
        hvd.allreduce(x, op=11)
    with raises((TypeError, ValueError), "bool"):
        hvd.allreduce(x.bool())
    with raises(ValueError, "no tensors"):
        hvd.grouped_allreduce([])
    with raises(ValueError, "is not the handle"):
        hvd.poll(5)
    same(hvd.allreduce(x), x)


def test_requires_grad_is_no_obstacle(world) -> None:
    weight = torch.nn.Parameter(draw(world.rank, (3,)))
    assert hvd.allreduce_(weight, op=hvd.Sum) is weight
    same(weight.data, total(world.size, (3,)))
    turned = torch.nn.Parameter(draw(world.rank, (3, 2)).t())
    hvd.broadcast_(turned, 0)
    same(turned.data, draw(0, (3, 2)).t())
    assert not hvd.allreduce_async(weight).wait().requires_grad


def test_a_handle_does_not_keep_the_tensors(world) -> None:
    x = torch.ones(3)
    alive = weakref.ref(x)
    handle = hvd.allreduce_async_(x, name="short")
    handle.wait()
    hvd.barrier()  # the core releases its references in the next call
    del x
    assert alive() is None
    assert handle.done()
