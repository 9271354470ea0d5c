"""Every collective of the device communicator, on stubs of CUDA and not on a GPU.

The tests check which kernels and NCCL operations ringjax enqueues, and compare their
results with NumPy. Other files test_nccl_*_stub.py have the failures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.device_calls import (
    COMPLEX,
    DTYPES,
    FLOATS,
    INTEGERS,
    OPS,
    REDUCIBLE,
    Device,
    NcclLog,
    empty_like,
    equal,
    open_at_init,
    reduced,
    reopen,
    wire,
)
from support.device_code import HAS_KERNELS, needs_kernels
from support.draws import draw
from support.rank_worker import VARIABLE, World
from support.stubs import stub_environment

import ringjax
from ringjax import runtime

pytestmark = pytest.mark.ranks(1, 2, 3, env=stub_environment)

SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (1001,), (), (0, 4), (1, 1, 7))
MODES = ("hybrid", "pack", "group")
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def module_log() -> Iterator[NcclLog | None]:
    """Prepares a rank before its first `ringjax.init`; yields the log of NCCL calls."""
    if VARIABLE not in os.environ:
        yield None
        return
    log = NcclLog.begin(os.environ[VARIABLE])
    open_at_init()
    yield log


@pytest.fixture
def device(world: World) -> Device:
    return Device()


@pytest.fixture
def log(device: Device, module_log: NcclLog) -> NcclLog:
    module_log.take()
    return module_log


@pytest.fixture(params=MODES)
def fusing(request: pytest.FixtureRequest, device: Device) -> Device:
    """Returns a communicator with one of the ways to fuse tensors."""
    if runtime.config().fusion != request.param:
        return reopen(RINGJAX_FUSION=request.param)
    return device


def inputs(
    size: int, dtypes: tuple[str, ...], shapes: Any = SHAPES
) -> list[list[np.ndarray]]:
    """Returns the arrays of all ranks, for each tensor: every shape of every dtype."""
    return [
        draw(size, shape, dtype, seed)
        for seed, dtype in enumerate(dtypes)
        for shape in shapes
    ]


def both(
    device: Device,
    op: str,
    stacks: list[list[np.ndarray]],
    check: Callable[[list[np.ndarray]], None],
    **options: Any,
) -> None:
    """Runs a call into other memory, then in place, and checks both results."""
    mine = [xs[device.rank] for xs in stacks]
    outs = empty_like(mine)
    device.run(op, mine, outs, **options)
    check(outs)
    for array, xs in zip(mine, stacks, strict=True):
        equal(array, xs[device.rank])  # operands are not modified
    copies = [array.copy() for array in mine]
    device.run(op, copies, **options)
    check(copies)


def tolerance(op: str, array: np.ndarray) -> float:
    if op != "Average":
        return 0.0
    return 2e-2 if array.dtype.itemsize == 2 else 1e-6


@pytest.mark.parametrize("op", OPS)
def test_allreduce_of_every_dtype(fusing: Device, op: str) -> None:
    undefined = {"Average": ("bool",), "Sum": ()}.get(op, COMPLEX)
    stacks = inputs(fusing.size, tuple(d for d in REDUCIBLE if d not in undefined))

    def check(outs: list[np.ndarray]) -> None:
        for out, xs in zip(outs, stacks, strict=True):
            equal(out, reduced(op, xs), tolerance(op, out))

    both(fusing, "allreduce", stacks, check, reduce=op, name="all")


@needs_kernels
@pytest.mark.parametrize(("before", "after"), [(0.5, 1.0), (1.0, 0.3), (3.0, 0.25)])
def test_allreduce_scaled(fusing: Device, before: float, after: float) -> None:
    stacks = inputs(fusing.size, (*FLOATS, *INTEGERS, *COMPLEX), [(33,), ()])
    host = runtime.current("test").communicators[0]
    factors = {"prescale": before, "postscale": after, "name": "scaled"}

    def check(outs: list[np.ndarray]) -> None:
        for out, xs in zip(outs, stacks, strict=True):
            want = np.asarray(reduced("Sum", xs).astype("c16") * before * after)
            if out.dtype.kind in "iu":  # each factor rounds, as in the host core
                want = xs[fusing.rank].copy()
                host.execute(0, 1, [want], [want], **factors)
            elif out.dtype.kind != "c":
                want = want.real
            equal(out, want.astype(out.dtype), 2e-2 if out.itemsize == 2 else 1e-6)

    both(fusing, "allreduce", stacks, check, **factors)


@needs_kernels
@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_allreduce_compressed(fusing: Device, name: str, op: str) -> None:
    stacks = inputs(fusing.size, ("float32", "float64", "int32", "bfloat16"))
    packed = fusing.stats("allreduce")["packed_bytes"]

    def check(outs: list[np.ndarray]) -> None:
        for out, xs in zip(outs, stacks, strict=True):
            equal(out, reduced(op, xs), 2e-2)

    both(fusing, "allreduce", stacks, check, wire=wire(name), reduce=op)
    floats = sum(xs[0].nbytes for xs in stacks if xs[0].dtype in ("f4", "f8"))
    assert fusing.stats("allreduce")["packed_bytes"] - packed >= 2 * floats


@pytest.mark.parametrize("count", [400, 1500])
def test_allreduce_of_many_tensors(fusing: Device, count: int) -> None:
    size, sizes = fusing.size, np.random.default_rng(7).integers(0, 300, count)
    stacks = [draw(size, (int(n),), "float32", int(n)) for n in sizes]
    before = fusing.stats("allreduce")

    def check(outs: list[np.ndarray]) -> None:
        for out, xs in zip(outs, stacks, strict=True):
            equal(out, reduced("Sum", xs))

    names = [f"layer{i}" for i in range(count)]
    both(fusing, "allreduce", stacks, check, name="grads", names=names)
    after = fusing.stats("allreduce")
    launches = after["launches"] - before["launches"]
    mode = runtime.config().fusion
    if HAS_KERNELS and (mode == "pack" or (mode == "hybrid" and size > 1)):
        tables = 1 if np.count_nonzero(sizes) <= 1360 else 2
        assert launches == 2 * 2 * tables  # both calls pack and unpack
    assert after["calls"] - before["calls"] == 2


@needs_kernels
def test_large_tensors_are_reduced_in_place(device: Device, log: NcclLog) -> None:
    device = reopen(RINGJAX_FUSION="hybrid")
    log.take()
    large, small = (3 * MIB // 4 + 1,), (5, 3)
    stacks = [draw(device.size, s, "float32", i) for i, s in enumerate([large, small])]
    mine = [xs[device.rank].copy() for xs in stacks for _ in range(2)]
    device.run("allreduce", mine, name="two")
    for i, out in enumerate(mine):
        equal(out, reduced("Sum", stacks[i // 2]))
    done = [e for e in log.take() if e["function"] == "ncclAllReduce"]
    counts = sorted(e["count"] for e in done)
    if device.size == 1:  # a single rank needs no NCCL operation
        assert counts == []
        return
    # The packed tensors have 15 elements, and begin at multiples of 16 bytes.
    assert counts == [15 + 1 + 15 + 1, large[0], large[0]]
    assert len({e["group"] for e in done}) == 1
    assert all(e["in_place"] for e in done)


@needs_kernels
def test_one_group_for_the_gradients_of_a_resnet(log: NcclLog, device: Device) -> None:
    sizes = [64, 256, 512, 1024, 2048] * 21 + [2359296, 1048576, 2048000]
    sizes += [36864, 65536, 147456] * 17 + [589824, 524288]
    arrays = [np.full(n, device.rank + 1.0, np.float32) for n in sizes]
    assert len(arrays) == 161
    device.run("allreduce", arrays, reduce="Average", name="grads")
    for array in arrays:
        assert (array == (device.size + 1) / 2).all()
    done = [e for e in log.take() if e["function"] == "ncclAllReduce"]
    if device.size == 1:
        assert done == []
        return
    assert len(done) == len([n for n in sizes if 4 * n >= MIB]) + 1
    assert len({e["group"] for e in done}) == 1
    assert {e["redop"] for e in done} == {"avg"}


def test_nothing_to_reduce(device: Device) -> None:
    device.run("allreduce", [])
    device.run("allreduce", [np.zeros((0, 3), np.float32)])
    one = np.array(device.rank, np.int64)
    device.run("allreduce", [one])
    assert one == sum(range(device.size))


def test_a_refused_call_does_not_spoil_a_good_one(device: Device) -> None:
    x, small = np.ones(7, np.float32), np.ones(6, np.float32)
    with pytest.raises(Exception, match="f32.7. has 24 bytes"):
        device.run("allreduce", [x], [small], name="good")
    device.run("allreduce", [x], name="good")
    assert (x == device.size).all()


def test_broadcast(fusing: Device) -> None:
    stacks = inputs(fusing.size, DTYPES)
    large = draw(fusing.size, (MIB // 2 + 3,), "float32", 9)
    for root in range(fusing.size):

        def check(outs: list[np.ndarray], root: int = root) -> None:
            for out, xs in zip(outs, [*stacks, large], strict=True):
                equal(out, xs[root])

        both(fusing, "broadcast", [*stacks, large], check, root=root, name="weights")


@pytest.mark.parametrize("uneven", [False, True])
def test_allgather(device: Device, uneven: bool) -> None:
    size, rank = device.size, device.rank
    rows = [(3 * r + 2) % 4 if uneven else 2 for r in range(size)]
    stacks = [
        draw(size, lambda r, tail=tail: (rows[r], *tail), dtype, seed)
        for seed, dtype in enumerate(DTYPES)
        for tail in ((5,), (), (0,))
    ]
    mine = [xs[rank] for xs in stacks]
    expected = [np.concatenate(xs) for xs in stacks]
    outs = empty_like(expected)
    device.run("allgather", mine, outs, counts=rows * len(mine), name="parts")
    for out, want in zip(outs, expected, strict=True):
        equal(out, want)


# For each case, the options of the call and the tolerance of the comparison.
REDUCESCATTER_CASES = {
    "sum": ({"reduce": "Sum"}, 0.0),
    "average": ({"reduce": "Average"}, 2e-2),
    "max": ({"reduce": "Max"}, 0.0),
    "product": ({"reduce": "Product"}, 0.0),
    "scaled": ({"reduce": "Sum", "prescale": 0.5, "postscale": 4.0}, 0.0),
    "compressed": ({"reduce": "Sum", "wire": wire("bf16")}, 2e-2),
}


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("case", REDUCESCATTER_CASES)
def test_reducescatter(device: Device, uneven: bool, case: str) -> None:
    options, allowed = REDUCESCATTER_CASES[case]
    if case in ("scaled", "compressed") and not HAS_KERNELS:
        pytest.skip("built without device code")
    op, size, rank = options["reduce"], device.size, device.rank
    rows = [(2 * r + 3) % 5 if uneven else 3 for r in range(size)]
    dtypes = [*FLOATS, *(() if op in ("Max", "Product") else COMPLEX)]
    dtypes += [] if case == "scaled" else INTEGERS
    stacks = [
        draw(size, (sum(rows), *tail), dtype, seed)
        for seed, dtype in enumerate(dtypes)
        for tail in ((5,), ())
    ]
    first = sum(rows[:rank])
    expected = [reduced(op, xs)[first : first + rows[rank]] for xs in stacks]
    if case == "scaled":
        expected = [(want * 2).astype(want.dtype) for want in expected]
    outs = empty_like(expected)
    mine = [xs[rank] for xs in stacks]
    device.run("reducescatter", mine, outs, counts=rows * len(mine), **options)
    for out, want in zip(outs, expected, strict=True):
        equal(out, want, allowed)


@pytest.mark.parametrize("kind", ["even", "uneven", "nothing"])
def test_alltoall(device: Device, kind: str) -> None:
    size, rank = device.size, device.rank
    # Rank i sends rows[i][j] rows to rank j.
    formula = {"even": lambda i, j: 2, "uneven": lambda i, j: (i + 2 * j) % 3}
    rows = [
        [formula.get(kind, lambda i, j: 0)(i, j) for j in range(size)]
        for i in range(size)
    ]
    stacks = [
        draw(size, lambda r, tail=tail: (sum(rows[r]), *tail), dtype, seed)
        for seed, dtype in enumerate(DTYPES)
        for tail in ((3,), ())
    ]
    received = [rows[i][rank] for i in range(size)]

    def part(xs: list[np.ndarray], source: int) -> np.ndarray:
        first = sum(rows[source][:rank])
        return xs[source][first : first + rows[source][rank]]

    expected = [np.concatenate([part(xs, i) for i in range(size)]) for xs in stacks]
    outs = empty_like(expected)
    counts = [*rows[rank], *received] * len(stacks)
    device.run("alltoall", [xs[rank] for xs in stacks], outs, counts=counts)
    for out, want in zip(outs, expected, strict=True):
        equal(out, want)


def test_barrier(device: Device) -> None:
    for _ in range(3):
        device.run("barrier")
    assert device.stats("barrier")["calls"] >= 3


def test_many_calls_without_waiting(device: Device) -> None:
    total = np.full(3, 1.0, np.float64)
    large = np.full(MIB // 4 + 5, 1.0, np.float32)
    for _ in range(200):
        device.enqueue("allreduce", [total, large], reduce="Average", name="again")
        device.enqueue("broadcast", [total], root=device.size - 1)
    device.core.synchronize()
    assert (total == 1).all()
    assert (large == 1).all()


@pytest.mark.ranks(3, env=stub_environment)
def test_overlapping_process_sets_and_the_world(device: Device) -> None:
    rank = device.rank
    sets = [ringjax.add_process_set([0, 1]), ringjax.add_process_set([2, 1])]
    ends = {s.process_set_id: Device(s.process_set_id) for s in sets if s.included()}
    for i in range(20):
        whole, small = np.full(7, rank + i, np.float32), {}
        device.enqueue("allreduce", [whole], name="world")
        for s in sets:
            if s.included():
                x = small[s.process_set_id] = np.full(5, rank + 1, np.int32)
                ends[s.process_set_id].enqueue("allreduce", [x], name="set")
        device.core.synchronize()
        for s in sets:
            if s.included():
                assert (small[s.process_set_id] == sum(r + 1 for r in s.ranks)).all()
        assert (whole == 3 + 3 * i).all()
    for s in sets:
        assert ringjax.remove_process_set(s)
    again = ringjax.add_process_set([0, 2])
    if again.included():
        x = np.full(5, rank + 1, np.int32)
        Device(again.process_set_id).run("allreduce", [x])
        assert (x == 4).all()
    assert ringjax.remove_process_set(again)
    for end in ends.values():
        with pytest.raises(Exception, match="ringjax is shut down"):
            end.enqueue("allreduce", [np.zeros(1, np.float32)])
