"""CUDA tensors in the eager lane, on stubs of CUDA and NCCL and not on a GPU.

The tests check which operations ringjax enqueues, on which streams and in which order,
and compare results with NumPy. test_eager_cuda_failures_stub.py has the failures.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.device_calls import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    OPS,
    DefaultStream,
    NcclLog,
    empty_like,
    equal,
    reduced,
)
from support.device_code import HAS_KERNELS, needs_kernels
from support.draws import draw
from support.lane_calls import (
    LaneClient,
    OtherDeviceMemory,
    live_resources,
    without_jax,
)
from support.rank_worker import VARIABLE, World
from support.stubs import stub_environment

import ringjax
from ringjax import _native, runtime

pytestmark = pytest.mark.ranks(1, 2, 3, env=stub_environment)
several = pytest.mark.ranks(2, 3, env=stub_environment)

DTYPES = (*INTEGERS, *FLOATS, *COMPLEX, "bool", "int16")
SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (), (0, 4), (1001,))
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def module_log() -> Iterator[NcclLog | None]:
    """Prepares a rank before its first `ringjax.init`; yields the log of NCCL calls."""
    if VARIABLE not in os.environ:
        yield None
        return
    without_jax()
    yield NcclLog.begin(os.environ[VARIABLE])


@pytest.fixture
def end(world: World) -> LaneClient:
    assert "jax" not in sys.modules
    return LaneClient()


@pytest.fixture
def log(end: LaneClient, module_log: NcclLog) -> NcclLog:
    module_log.take()
    return module_log


@pytest.fixture
def stream(end: LaneClient) -> Iterator[DefaultStream]:
    stream = DefaultStream()
    yield stream
    stream.finish()
    stream.close()


def tolerance(reduce: str, array: np.ndarray) -> float:
    if reduce != "Average":
        return 0.0
    return 2e-2 if array.dtype.itemsize == 2 else 1e-6


@pytest.mark.parametrize("reduce", OPS)
def test_allreduce_of_every_dtype(end: LaneClient, reduce: str) -> None:
    undefined = {"Average": ("bool",), "Sum": ()}.get(reduce, COMPLEX)
    dtypes = [d for d in (*INTEGERS, *FLOATS, *COMPLEX, "bool") if d not in undefined]
    stacks = [draw(end.size, s, d, i) for i, d in enumerate(dtypes) for s in SHAPES]
    mine = [xs[end.rank] for xs in stacks]
    alone = [
        end.submit("allreduce", f"{reduce}.{i}", [x], reduce=reduce)
        for i, x in enumerate(mine)
    ]
    group = end.submit("allreduce", f"{reduce}.group", mine, reduce=reduce)
    inplace = [x.copy() for x in mine]
    again = end.submit(
        "allreduce", f"{reduce}.in place", inplace, inplace, reduce=reduce
    )
    results = [one.wait()[0] for one in alone]
    for outs in (results, group.wait(), again.wait()):
        for out, xs in zip(outs, stacks, strict=True):
            want = reduced(reduce, xs)
            equal(out, want, tolerance(reduce, want))
    for x, xs in zip(mine, stacks, strict=True):
        equal(x, xs[end.rank])  # operands are not modified


@needs_kernels
@pytest.mark.parametrize(("before", "after"), [(0.5, 1.0), (3.0, 0.25)])
def test_allreduce_scaled(end: LaneClient, before: float, after: float) -> None:
    stacks = [draw(end.size, (33,), d, i) for i, d in enumerate((*FLOATS, *COMPLEX))]
    factors = {"prescale": before, "postscale": after}
    outs = end.run("allreduce", "scaled", [xs[end.rank] for xs in stacks], **factors)
    for out, xs in zip(outs, stacks, strict=True):
        want = np.asarray(reduced("Sum", xs).astype("c16") * before * after)
        want = want if out.dtype.kind == "c" else want.real
        equal(out, want.astype(out.dtype), 2e-2 if out.itemsize == 2 else 1e-6)


def test_broadcast(end: LaneClient) -> None:
    for root in range(end.size):
        stacks = [draw(end.size, s, d) for d in DTYPES for s in SHAPES]
        mine = [xs[end.rank] for xs in stacks]
        outs = end.run("broadcast", f"from {root}", mine, root=root)
        for out, xs in zip(outs, stacks, strict=True):
            equal(out, xs[root])


@pytest.mark.parametrize("uneven", [False, True])
def test_allgather(end: LaneClient, uneven: bool) -> None:
    rows = [(3 * r + 2) % 4 if uneven else 2 for r in range(end.size)]
    stacks = [
        draw(end.size, lambda r, tail=tail: (rows[r], *tail), dtype, 1)
        for dtype in DTYPES
        for tail in ((5,), (), (0,))
    ]
    pending = end.submit("allgather", "rows", [xs[end.rank] for xs in stacks])
    for i, (out, xs) in enumerate(zip(pending.wait(), stacks, strict=True)):
        equal(out, np.concatenate(xs))
        assert pending.ticket.received(i) == rows


@pytest.mark.parametrize("reduce", ["Sum", "Average", "Max"])
def test_reducescatter_with_a_remainder(end: LaneClient, reduce: str) -> None:
    size, rank = end.size, end.rank
    bounds = np.cumsum([0, *(7 // size + (r < 7 % size) for r in range(size))])
    part = slice(bounds[rank], bounds[rank + 1])
    stacks = [draw(size, (7, *tail), d) for d in FLOATS for tail in ((3,), ())]
    mine = [xs[rank] for xs in stacks]
    outs = empty_like([x[part] for x in mine])
    end.run("reducescatter", "parts", mine, outs, reduce)
    for out, xs in zip(outs, stacks, strict=True):
        want = reduced(reduce, xs)[part]
        equal(out, want, tolerance(reduce, want))


@pytest.mark.parametrize("kind", ["equal", "uneven", "nothing"])
def test_alltoall(end: LaneClient, kind: str) -> None:
    size, rank = end.size, end.rank
    parts = {"equal": lambda i, j: 2, "uneven": lambda i, j: (i + 2 * j) % 3}
    rows = [[parts.get(kind, lambda i, j: 0)(i, j) for j in range(size)]
            for i in range(size)]  # fmt: skip
    stacks = [draw(size, lambda r: (sum(rows[r]), 3), dtype) for dtype in DTYPES]
    splits = [] if kind == "equal" else rows[rank] * len(stacks)
    mine = [xs[rank] for xs in stacks]
    pending = end.submit("alltoall", "rows", mine, splits=splits)
    for i, (out, xs) in enumerate(zip(pending.wait(), stacks, strict=True)):
        starts = [sum(rows[s][:rank]) for s in range(size)]
        got = [x[a : a + rows[s][rank]] for s, (x, a) in enumerate(zip(xs, starts,
               strict=True))]  # fmt: skip
        equal(out, np.concatenate(got))
        assert pending.ticket.received(i) == [rows[s][rank] for s in range(size)]


def test_barrier_and_empty_tensors(end: LaneClient) -> None:
    end.submit("barrier", "all", []).ticket.wait()
    assert end.run("allreduce", "empty", [np.zeros((0, 3), np.float32)])[0].size == 0


def test_operations_in_any_order_are_fused(end: LaneClient, log: NcclLog) -> None:
    count = 200
    stacks = [draw(end.size, (1 + i % 7,), "float32", i) for i in range(count)]
    for step in range(3):
        order = list(range(count))
        random.Random(end.rank * 100 + step).shuffle(order)
        before = end.lane.stats()
        pending = {
            i: end.submit("allreduce", f"grad.{i}", [stacks[i][end.rank]])
            for i in order
        }
        random.Random(end.rank).shuffle(order)
        for i in order:
            equal(pending[i].wait()[0], reduced("Sum", stacks[i]))
        after = end.lane.stats()
        assert after["fused"] - before["fused"] == count
        if end.size == 1:  # a single rank does not wait, so it fuses nothing
            continue
        calls = after["calls"] - before["calls"]
        assert calls < count
        # Fused operations are packed, which needs kernels.
        done = [e for e in log.take() if e["function"] == "ncclAllReduce"]
        assert len(done) == calls or not HAS_KERNELS


@needs_kernels
@several
def test_large_tensors_are_reduced_in_place(end: LaneClient, log: NcclLog) -> None:
    shapes = [(3 * MIB // 4 + 1,), (5, 3), (4,)]
    stacks = [draw(end.size, s, "float32", i) for i, s in enumerate(shapes)]
    mine = [xs[end.rank].copy() for xs in stacks]
    for out, xs in zip(end.run("allreduce", "g", mine, mine), stacks, strict=True):
        equal(out, reduced("Sum", xs))
    done = [e for e in log.take() if e["function"] == "ncclAllReduce"]
    assert sorted(e["count"] for e in done) == [16 + 4, shapes[0][0]]
    assert len({e["group"] for e in done}) == 1


# -- streams and memory ----------------------------------------------------------------


def test_streams_wait_but_the_host_does_not(
    end: LaneClient, stream: DefaultStream
) -> None:
    xs = draw(end.size, (4099,), "float32", 3)
    x, y = np.zeros_like(xs[0]), np.zeros_like(xs[0])
    seen = np.zeros_like(x)
    release = stream.hold()
    stream.copy(xs[end.rank], x)  # x is submitted before the stream has filled it
    pending = end.submit("allreduce", "late", [x], [y])
    pending.ticket.wait()
    stream.copy(y, seen)
    assert not pending.ticket.done
    assert (y == 0).all()
    release()
    stream.finish()
    equal(seen, reduced("Sum", xs))
    assert pending.ticket.done


def test_another_stream_can_use_the_results(
    end: LaneClient, stream: DefaultStream
) -> None:
    other = stream.another()
    x, seen = np.ones(9, np.float32), np.zeros(9, np.float32)
    release = stream.hold()
    pending = end.submit("allreduce", "two", [x])
    pending.ticket.wait(stream=other)
    stream.copy(pending.outs[0], seen, other)
    release()
    stream.finish(other)
    assert (seen == end.size).all()


class Owner:
    """Stands for a tensor that owns its memory."""


def test_memory_is_kept_until_its_last_use(
    end: LaneClient, stream: DefaultStream
) -> None:
    x = np.ones(5, np.float32)

    def submit(name: str) -> tuple[Any, Any]:
        owner = Owner()
        pending = end.submit("allreduce", name, [x], [x], keep=owner)
        end.submit("barrier", f"{name}.enqueued", []).ticket.wait()
        return weakref.ref(owner), pending

    def run_barriers() -> None:
        end.submit("barrier", "any", []).ticket.wait()
        end.submit("barrier", "any", []).ticket.wait()

    release = stream.hold()
    dropped, _ = submit("dropped")
    run_barriers()
    assert dropped() is not None
    release()
    end.run("allreduce", "after it", [np.ones(1, np.float32)])
    run_barriers()
    assert dropped() is None

    release = stream.hold()
    # `wait` lets the stream of the caller wait for the operation, so later work on this
    # stream cannot reuse the memory too early. Therefore the owner may be released
    # before the operation has finished.
    waited_for, pending = submit("waited for")
    pending.ticket.wait()
    run_barriers()
    assert not pending.ticket.done
    assert waited_for() is None
    release()


def test_all_driver_objects_are_freed(end: LaneClient) -> None:
    def run_step(step: int) -> None:
        x, many = np.ones((4, 2), np.float32), [np.ones(3, np.float32)] * 20
        pending = [
            end.submit("allreduce", f"{step}.{i}", [a]) for i, a in enumerate(many)
        ]
        pending.append(end.submit("allgather", f"{step}.g", [x]))
        for one in pending:
            one.wait()

    run_step(0)
    gc.collect()
    _, streams, memory = live_resources()
    for step in range(1, 50):
        run_step(step)
    gc.collect()
    now = live_resources()
    # A step has 21 submissions, which use up to fourteen events each if all wait at
    # once, and two steps may overlap. Events are reused, so there are fewer events than
    # the 49 * 21 submissions. Waiting submissions share scratch memory.
    assert now[0] < 49 * 21
    assert now[1] == streams
    assert now[2] <= memory + 1
    ringjax.shutdown()
    assert live_resources() == (0, 0, 0)
    ringjax.init()
    assert (
        LaneClient().run("allreduce", "again", [np.ones(2, np.float32)])[0][0]
        == end.size
    )


# -- other tensors and other devices ---------------------------------------------------


def test_cuda_and_host_tensors_in_one_round(end: LaneClient) -> None:
    for i in range(10):
        x, y = np.full(3, i, np.float32), np.full(3, i, np.float64)
        host = end.submit("allreduce", f"host {i}", [x], cuda=False)
        device = end.submit("allreduce", f"device {i}", [y])
        assert (device.wait()[0] == i * end.size).all()
        assert (host.wait()[0] == i * end.size).all()


@several
def test_tensors_on_different_devices_are_a_mismatch(end: LaneClient) -> None:
    x = np.ones(3, np.float32)
    pending = end.submit("allreduce", "apart", [x], cuda=end.rank > 0)
    with pytest.raises(_native.StatusError, match="Mismatched devices.*'apart'"):
        pending.wait()
    assert end.run("allreduce", "together", [x])[0][0] == end.size


def test_unsupported_operations_are_refused_at_once(end: LaneClient) -> None:
    x = np.ones(3, np.float32)
    for reduce, array, text in (
        ("Adasum", x, "ADASUM|power of two"),
        ("Sum", x.astype("int16"), "NCCL has no reduction of i16"),
        ("Product", x.astype("c8"), "NCCL has no PRODUCT of c64"),
    ):
        with pytest.raises(_native.StatusError, match=text) as caught:
            end.submit("allreduce", "impossible", [array], reduce=reduce)
        assert caught.value.code == "INVALID_ARGUMENT"
    assert end.run("allreduce", "possible", [x])[0][0] == end.size


@pytest.mark.ranks(2, env=partial(stub_environment, CUDA_STUB_DEVICES=2))
def test_tensors_on_two_devices_of_one_rank_are_refused(end: LaneClient) -> None:
    # Rank n uses device n, as is usual with PyTorch.
    mine, wrong = (
        OtherDeviceMemory(end.rank, 5).array,
        OtherDeviceMemory(1 - end.rank, 5).array,
    )
    for array in (mine, mine):
        end.run("allreduce", "first", [array], [array])
    assert (mine == 4).all()
    text = f"on CUDA device {1 - end.rank}, but .* CUDA device {end.rank}"
    with pytest.raises(_native.StatusError, match=text):
        end.submit("allreduce", "moved", [wrong], [wrong])
    with pytest.raises(_native.StatusError, match="on the CUDA devices . and ."):
        end.submit("allreduce", "both", [mine, wrong], [mine, wrong])
    (gathered,) = end.run("allgather", "rows", [mine])
    assert (gathered == 4).all()


@several
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
def test_a_rank_that_has_joined(end: LaneClient, fresh: bool) -> None:
    if fresh:  # the joined rank has had no CUDA tensor, so it takes its default device
        ringjax.shutdown()
        ringjax.init()
        end = LaneClient()
    if end.rank == end.size - 1:
        end.lane.join().wait()
    else:
        check_with_a_joined_rank(end)
        end.lane.join().wait()
    (out,) = end.run("allreduce", "after the join", [np.ones(2, np.float32)])
    assert (out == end.size).all()


def check_with_a_joined_rank(end: LaneClient) -> None:
    """Runs all operations while the last rank has joined, which contributes zeros."""
    size, others = end.size, range(end.size - 1)
    for dtype in ("float32", "float64", "float16", "int8", "int64"):
        xs = draw(size, (5, 3), dtype, 2)[:-1]
        x = xs[end.rank]
        for reduce in OPS:
            (out,) = end.run("allreduce", f"{dtype}.{reduce}", [x], reduce=reduce)
            want = reduced("Sum" if reduce == "Average" else reduce, xs)
            if reduce == "Average":
                wide = want.astype("f8") / size
                want = np.trunc(wide) if out.dtype.kind == "i" else wide
                want = want.astype(out.dtype)
            equal(out, want, tolerance(reduce, want))
        (out,) = end.run("broadcast", f"{dtype}.b", [x])
        equal(out, xs[0])
        (out,) = end.run("allgather", f"{dtype}.g", [x])
        equal(out, np.concatenate(xs))
        (out,) = end.run("alltoall", f"{dtype}.a", [x[:size]], splits=[1] * size)
        equal(out, np.stack([xs[r][end.rank] for r in others]))
        rows = 5 // size + (end.rank < 5 % size)
        (out,) = end.run("reducescatter", f"{dtype}.s", [x], [np.empty_like(x[:rows])])
        first = sum(5 // size + (r < 5 % size) for r in range(end.rank))
        equal(out, reduced("Sum", xs)[first : first + rows])


@pytest.mark.ranks(3, env=stub_environment)
def test_process_sets(end: LaneClient) -> None:
    sets = [ringjax.add_process_set([0, 1]), ringjax.add_process_set([2, 1])]
    ends = {s.process_set_id: LaneClient(s) for s in sets if s.included()}
    for i in range(10):
        whole = end.submit("allreduce", "x", [np.full(7, i, np.float32)])
        parts = [
            (s, ends[s.process_set_id].submit("allreduce", "x", [np.full(5, end.rank)]))
            for s in sets
            if s.included()
        ]
        for s, part in parts:
            assert (part.wait()[0] == sum(s.ranks)).all()
        assert (whole.wait()[0] == 3 * i).all()
    for s in sets:
        assert ringjax.remove_process_set(s)
    assert (end.run("allreduce", "x", [np.ones(2)])[0] == 3).all()


def test_the_settings_of_the_lane(end: LaneClient) -> None:
    assert end.lane.takes_cuda
    problem = runtime.current("test").devices.problem(0)
    assert problem.endswith("JAX had not been imported before ringjax.init()")
