"""START and DONE of the device communicator, on stubs of CUDA and not on a GPU.

The streams of the stub are threads, and its kernels are slow in these tests. So work
that does not wait where it must is visibly too early, and work that waits where it must
not is too late.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.device_calls import (
    DefaultStream,
    Device,
    empty_like,
    equal,
    open_at_init,
    reduced,
    reopen,
)
from support.device_code import needs_kernels
from support.draws import draw
from support.rank_worker import VARIABLE, World
from support.stubs import stub_environment
from support.waiting import until

from ringjax import _native, runtime

DELAY = 0.03  # seconds that a kernel takes
STUBS = partial(stub_environment, CUDA_STUB_DELAY_US=DELAY * 1e6)
pytestmark = pytest.mark.ranks(1, 3, env=STUBS)


@pytest.fixture(scope="module", autouse=True)
def device_at_init() -> None:
    if VARIABLE in os.environ:
        open_at_init()


@pytest.fixture(params=["1", "0"], ids=["two streams", "one stream"])
def device(request: pytest.FixtureRequest, world: World) -> Device:
    if runtime.config().comm_stream != (request.param == "1"):
        return reopen(RINGJAX_COMM_STREAM=request.param)
    return Device()


@pytest.fixture
def stream(device: Device) -> Iterator[DefaultStream]:
    stream = DefaultStream()
    yield stream
    stream.close()


@pytest.fixture
def failing_device(device: Device) -> Iterator[Device]:
    """Yields a communicator that the test may abort; opens a new epoch afterwards."""
    yield device
    reopen()


def buckets(size: int, count: int = 4) -> list[list[list[np.ndarray]]]:
    """Returns, for each bucket and tensor, the arrays of all ranks."""
    sizes = [(3, 5), (1001,), (), (300_000,)]
    return [
        [draw(size, shape, "float32", 10 * b + i) for i, shape in enumerate(sizes)]
        for b in range(count)
    ]


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "elsewhere"])
def test_several_buckets_in_flight(
    device: Device, stream: DefaultStream, in_place: bool
) -> None:
    stacks, kept = buckets(device.size), []
    for _ in range(2):  # sites are used again
        mine = [[xs[device.rank].copy() for xs in bucket] for bucket in stacks]
        middle = mine if in_place else [empty_like(bucket) for bucket in mine]
        last = mine if in_place else [empty_like(bucket) for bucket in mine]
        for site, bucket in enumerate(mine):
            device.start(
                bucket, middle[site], site=site, first=site == 0, reduce="Average"
            )
            if not in_place:
                # XLA may reuse an operand as soon as the stream has passed START.
                late = [np.full_like(array, 1e9) for array in bucket]
                for one, array in zip(late, bucket, strict=True):
                    stream.copy(one, array)
                kept.append(late)
        for site, bucket in enumerate(middle):
            device.done(bucket, last[site], site=site)
        device.core.synchronize()
        for outs, bucket in zip(last, stacks, strict=True):
            for out, xs in zip(outs, bucket, strict=True):
                equal(out, reduced("Average", xs), 1e-6)


# A single rank packs nothing, so no slow kernel runs.
@pytest.mark.ranks(3, env=STUBS)
@needs_kernels
def test_results_are_complete_after_done_only(
    device: Device, stream: DefaultStream
) -> None:
    world, early = runtime.current("test"), [False]

    def enough() -> bool:
        """Whether all ranks have seen an early copy; a busy machine delays copies."""
        if runtime.config().comm_stream:
            return all(world.exchange(any(early), "seen"))
        return len(early) > 5

    while not enough():
        x, y = np.full(8, 2.0, np.float32), np.full(8, 3.0, np.float32)
        between, after = np.zeros(8, np.float32), np.zeros(8, np.float32)
        started = time.monotonic()
        device.start([x, y])  # one slow kernel packs both, another one unpacks them
        stream.copy(x, between)  # only DONE makes the stream wait
        device.done()
        stream.copy(x, after)
        device.core.synchronize()
        assert time.monotonic() - started >= 2 * DELAY
        assert (after == 2 * device.size).all()
        early.append(bool((between == 2).all()))
    assert any(early) == runtime.config().comm_stream


def test_the_host_never_waits(device: Device, stream: DefaultStream) -> None:
    arrays = [np.ones(3, np.float32), np.ones(2, np.float32)]
    device.start(arrays)  # the first operation connects the peers
    device.done()
    device.core.synchronize()
    release = stream.hold()
    try:
        device.start(arrays)
        device.done()
        device.enqueue("allreduce", arrays)
        assert (arrays[0] == device.size).all()  # nothing has run yet
    finally:
        release()
    device.core.synchronize()
    assert (arrays[0] == device.size**3).all()


def test_device_time_is_recorded_apart_from_waiting(
    device: Device, stream: DefaultStream
) -> None:
    def device_seconds() -> float:
        sums = runtime.current("test").recorder.totals()
        return sum(s["device_seconds"] for s in sums if s["op"] == "allreduce")

    x = np.ones(8, np.float32)
    device.enqueue("allreduce", [x])  # connects the peers
    device.core.synchronize()
    before, began = device_seconds(), time.monotonic()
    release = stream.hold() if device.rank == 0 else None
    device.enqueue("allreduce", [x])
    runtime.current("test").exchange("", "enqueued")
    if release:  # rank 0 starts its operation late; the others wait on their devices
        time.sleep(1.0)
        began = time.monotonic()
        release()
    device.core.synchronize()
    longest = time.monotonic() - began
    if device.size == 1:  # a single rank sends nothing
        assert device_seconds() == 0
        return
    until(lambda: device_seconds() != before)  # the watch thread updates it later
    recorded = device_seconds() - before
    assert 0 < recorded <= longest
    assert device.rank == 0 or recorded > 0.2


def test_start_waits_for_earlier_kernels(device: Device, stream: DefaultStream) -> None:
    source, x = np.full(8, 5.0, np.float32), np.zeros(8, np.float32)
    stream.sleep(DELAY)
    stream.copy(source, x)
    device.start([x])
    device.done()
    device.core.synchronize()
    assert (x == 5 * device.size).all()


def test_done_needs_its_start(device: Device) -> None:
    with pytest.raises(_native.StatusError, match="DONE of bucket 7 without its START"):
        device.done(site=7)
    x = np.ones(3, np.float32)
    device.start([x], site=7)
    device.done(site=7)
    with pytest.raises(_native.StatusError, match="DONE of bucket 7 without its START"):
        device.done(site=7)
    device.core.synchronize()  # the errors have not aborted the communicator
    assert (x == device.size).all()


def test_a_step_that_is_never_collected_fails_on_all_ranks(
    failing_device: Device,
) -> None:
    device, arrays = failing_device, [np.ones(3, np.float32) for _ in range(4)]
    culprit = device.size - 1
    with pytest.raises(_native.StatusError) as caught:
        # The culprit may start its second step before others start the first.
        device.start([arrays[0]], site=0, name="grads")
        if device.rank != culprit:
            device.done(site=0)
        while True:
            device.start([arrays[1]], site=0, name="grads")
            device.done(site=0)
            device.core.synchronize()
    message = str(caught.value)
    assert f"rank {culprit} started a step and never collected" in message
    with pytest.raises(_native.StatusError, match=f"rank {culprit} started a step"):
        device.start([arrays[3]])
    with pytest.raises(_native.StatusError, match=f"rank {culprit} started a step"):
        device.done()
    with pytest.raises(_native.StatusError, match=f"rank {culprit} started a step"):
        device.core.check()


def test_a_cancelled_first_step_does_not_disturb_another_world(
    failing_device: Device,
) -> None:
    """A new epoch starts with no bucket in flight."""
    failing_device.start([np.ones(3, np.float32)], site=3)
    device = reopen()
    x: Any = np.ones(3, np.float32)
    device.start([x], site=3)
    device.done(site=3)
    device.core.synchronize()
    assert (x == device.size).all()
