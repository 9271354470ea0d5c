"""Every collective of ranks that share a GPU, against numpy on all ranks' inputs.

There are few calls, because a call of several ranks on one GPU takes 20 ms.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gpu_ranks
from support.draws import draw
from support.stacked import equal

import ringjax
from ringjax import Average, Compression, Max, Min, Product, Sum

# Four ranks take twice as long, so two ranks alone run the tests that do not depend on
# the number of ranks.
pytestmark = pytest.mark.ranks(2, 4, env=gpu_ranks.environment)
two_ranks = pytest.mark.ranks(2)

INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
REDUCED = (*INTEGERS, *FLOATS)  # types that NCCL reduces
MOVED = (*REDUCED, "bool", "int16", "uint16", "complex64")
REDUCE: dict[int, Any] = {
    Sum: np.add,
    Min: np.minimum,
    Max: np.maximum,
    Product: np.multiply,
}
# Sizes of every kind: empty, odd, and below and above the default limit of packing.
SHAPES = ((), (1,), (0, 3), (3,), (17, 5), (1001,), (129, 1023), (600_001,))


def reduced(op: int, xs: list[Any]) -> Any:
    """Reduces the arrays of all ranks in numpy."""
    if op == Average:
        total = reduced(Sum, xs)
        mean = total.astype(np.float64) / len(xs)
        return (np.trunc(mean) if total.dtype.kind in "iu" else mean).astype(
            total.dtype
        )
    out = xs[0]
    for x in xs[1:]:
        out = np.asarray(REDUCE[op](out, x)).astype(out.dtype)
    return out


def test_a_gpu_is_used_through_nccl(world) -> None:
    ringjax.allreduce(jnp.ones(3))  # JAX makes the communicator when it first needs it
    assert (jax.default_backend() == "gpu") is not gpu_ranks.ON_CPU
    assert gpu_ranks.uses_nccl() is not gpu_ranks.ON_CPU


@pytest.mark.parametrize(
    ("op", "dtypes"),
    [
        pytest.param(Sum, REDUCED, id="Sum"),
        pytest.param(Average, FLOATS, id="Average of floats"),
        pytest.param(Average, INTEGERS, id="Average of integers", marks=two_ranks),
        pytest.param(Min, REDUCED, id="Min", marks=two_ranks),
        pytest.param(Max, REDUCED, id="Max", marks=two_ranks),
        pytest.param(Product, REDUCED, id="Product", marks=two_ranks),
    ],
)
def test_allreduce_of_every_dtype(world, op, dtypes) -> None:
    """All dtypes travel as one tree, eagerly and in jit."""
    xs = {dtype: draw(world.size, (5, 7), dtype) for dtype in dtypes}
    mine = {dtype: x[world.rank] for dtype, x in xs.items()}
    for f in (ringjax.allreduce, jax.jit(ringjax.allreduce, static_argnums=1)):
        for dtype, out in f(mine, op).items():
            exact = op != Average or dtype in INTEGERS
            near = 0.0 if exact else 1e-2 if dtype[-2:] == "16" else 1e-6
            equal(out, reduced(op, xs[dtype]), near)


def test_allreduce_of_odd_and_large_sizes_in_donated_memory(world) -> None:
    xs = [draw(world.size, shape, seed=i) for i, shape in enumerate(SHAPES)]
    f = jax.jit(lambda tree: ringjax.allreduce(tree, Sum), donate_argnums=0)
    for _ in range(2):
        out = f([jnp.asarray(x[world.rank]) for x in xs])
        for got, stack in zip(out, xs, strict=True):
            equal(got, reduced(Sum, stack))


def test_prescale_and_postscale(world) -> None:
    xs = [draw(world.size, (33,), seed=1), draw(world.size, (400_003,), seed=2)]
    out = ringjax.allreduce(
        [x[world.rank] for x in xs], Sum, prescale_factor=0.5, postscale_factor=3.0
    )
    for got, stack in zip(out, xs, strict=True):
        equal(got, 1.5 * reduced(Sum, stack), 1e-6)


@pytest.mark.parametrize("wire", [Compression.fp16, Compression.bf16])
def test_compression_leaves_integers_alone(world, wire) -> None:
    xs, ns = draw(world.size, (100_003,)), draw(world.size, (9,), "int32")
    mine = [xs[world.rank], ns[world.rank]]
    out = ringjax.allreduce(mine, Sum, compression=wire)
    equal(out[0], reduced(Sum, xs), 2e-2)
    equal(out[1], reduced(Sum, ns))


def test_broadcast(world) -> None:
    xs = {dtype: draw(world.size, (3, 5), dtype) for dtype in MOVED}
    root = world.size - 1
    out = ringjax.broadcast({dtype: x[world.rank] for dtype, x in xs.items()}, root)
    for dtype, got in out.items():
        equal(got, xs[dtype][root])


def test_allgather_of_uneven_and_of_large_arrays(world) -> None:
    shape = lambda r: (2 * r + 1, 3)  # noqa: E731
    xs = {dtype: draw(world.size, shape, dtype) for dtype in MOVED}
    out = ringjax.allgather({dtype: x[world.rank] for dtype, x in xs.items()})
    for dtype, got in out.items():
        equal(got, np.concatenate(xs[dtype]))
    large = draw(world.size, (70_001,))
    equal(jax.jit(ringjax.allgather)(large[world.rank]), np.concatenate(large))


def test_reducescatter_into_uneven_and_into_large_parts(world) -> None:
    rank, size = world.rank, world.size
    bounds = np.cumsum([0, *(7 // size + (r < 7 % size) for r in range(size))])
    xs = {dtype: draw(size, (7, 3), dtype) for dtype in REDUCED}
    out = ringjax.reducescatter({dtype: x[rank] for dtype, x in xs.items()}, Sum)
    for dtype, got in out.items():
        equal(got, reduced(Sum, xs[dtype])[bounds[rank] : bounds[rank + 1]])
    large = draw(size, (size * 30_001,))
    rows = slice(rank * 30_001, (rank + 1) * 30_001)
    mean = jax.jit(ringjax.reducescatter)(large[rank])
    equal(mean, reduced(Average, large)[rows], 1e-6)


def test_alltoall_of_equal_parts(world) -> None:
    xs = {dtype: draw(world.size, (2 * world.size, 3), dtype) for dtype in MOVED}
    out = ringjax.alltoall({dtype: x[world.rank] for dtype, x in xs.items()})
    part = slice(2 * world.rank, 2 * world.rank + 2)
    for dtype, got in out.items():
        equal(got, np.concatenate([x[part] for x in xs[dtype]]))


def test_alltoall_of_uneven_parts(world) -> None:
    rank, size = world.rank, world.size
    table = np.random.default_rng(4).integers(0, 4, (size, size))
    xs = draw(size, lambda r: (int(table[r].sum()), 2), "float64", 1)
    got, received = ringjax.alltoall(xs[rank], splits=table[rank])
    starts = np.concatenate([np.zeros((size, 1), int), table.cumsum(1)], axis=1)
    parts = [x[starts[s, rank] : starts[s, rank + 1]] for s, x in enumerate(xs)]
    equal(got, np.concatenate(parts))
    equal(received, table[:, rank].astype(np.int32))


def test_no_rank_leaves_a_barrier_before_the_last_rank_enters(world) -> None:
    time.sleep(0.3 if world.rank == world.size - 1 else 0.0)
    started = time.monotonic()
    ringjax.barrier()
    waited = time.monotonic() - started
    assert world.rank > 0 or waited > 0.1, (
        f"waited {waited:.3f} s for a rank 0.3 s late"
    )


def test_process_sets(world) -> None:
    ends = ringjax.add_process_set(sorted({0, world.size - 1}))
    alone = ringjax.add_process_set([world.size - 1])
    xs = draw(world.size, (1003,))
    for chosen in (ends, alone):
        if chosen.included():
            stack = [xs[r] for r in chosen.ranks]
            out = ringjax.allreduce(xs[world.rank], Sum, process_set=chosen)
            equal(out, reduced(Sum, stack))
    equal(ringjax.allreduce(xs[world.rank], Sum), reduced(Sum, xs))
    assert ringjax.remove_process_set(alone)
    if world.size > 2:  # with two ranks, `ends` is the world, which stays
        assert ringjax.remove_process_set(ends)


def test_jit_vmap_grad_and_scan(world) -> None:
    xs = draw(world.size, (3, 4), "float64", 7)
    x = jnp.asarray(xs[world.rank])
    batched = jax.jit(jax.vmap(lambda v: ringjax.allreduce(v, Sum)))(x)
    equal(batched, reduced(Sum, xs))

    def loss(v: Any) -> Any:
        return jnp.sum(ringjax.allreduce(v * v, Sum)) * (world.rank + 1)

    weight = sum(r + 1 for r in range(world.size))
    equal(jax.jit(jax.grad(loss))(x), 2 * xs[world.rank] * weight, 1e-12)

    @jax.jit
    def scanned(v: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            carry = ringjax.allreduce(carry, Average) + 1
            return carry, carry.sum()

        return jax.lax.scan(body, v, None, length=4)

    out, sums = scanned(x)
    mean = reduced(Average, xs)
    equal(out, mean + 4, 1e-12)
    equal(sums, np.array([(mean + k).sum() for k in range(1, 5)]), 1e-12)


# This test is the last one, because it ends the communicator of the device.
def test_ranks_that_disagree_get_an_error(world) -> None:
    """All ranks get an error that names the call, and no earlier call has a result.

    A call on a device is only enqueued, so a later call may raise the error. More than
    two ranks make different collectives: the host exchanges the sizes of an eager
    allgather as eight bytes, which must not be mistaken for eight bytes of other data.
    """
    if world.size > 2:
        with pytest.raises(Exception, match="apart"):
            if world.rank == 0:
                np.asarray(ringjax.allreduce(np.ones(2, np.float32), name="apart"))
                ringjax.barrier(name="apart")
            else:
                ringjax.allgather(np.ones((2, 2), np.float32), name="apart")
        return
    mine = np.ones(3 + (world.rank == 0), np.float32)
    deadline = time.monotonic() + 20
    with pytest.raises(Exception, match="apart"):
        while time.monotonic() < deadline:
            out = np.asarray(ringjax.allreduce(mine, name="apart"))
            assert np.isnan(out).all(), f"a result of calls that do not match: {out}"
            time.sleep(0.1)
