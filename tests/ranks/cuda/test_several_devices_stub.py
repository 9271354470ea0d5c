"""Processes with several CUDA devices, on stubs of CUDA and NCCL and not on a GPU.

Each device has a communicator with the devices at the same position on other ranks. The
calls of a device do not wait for other devices of its process, so programs over some
devices may run beside programs over others. test_several_devices_failures_stub.py has
the failures.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from support.device_calls import (
    DefaultStream,
    Device,
    NcclLog,
    equal,
    open_at_init,
    reduced,
    reopen,
)
from support.draws import draw
from support.rank_worker import VARIABLE, World
from support.several_devices import Devices
from support.stubs import stub_environment

import ringjax
from ringjax import _native, runtime

VISIBLE_DEVICES = 4


def environment() -> Mapping[str, str]:
    return stub_environment(CUDA_STUB_DEVICES=VISIBLE_DEVICES)


pytestmark = pytest.mark.ranks(1, 2, 3, env=environment)
SMALL, LARGE = (5, 3), ((1 << 18) + 1,)  # shapes that are packed, and reduced in place


@pytest.fixture(scope="module", autouse=True)
def module_log() -> Iterator[NcclLog | None]:
    """Prepares a rank before its first `ringjax.init`; yields the log of NCCL calls."""
    if VARIABLE not in os.environ:
        yield None
        return
    log = NcclLog.begin(os.environ[VARIABLE])
    open_at_init()
    yield log


@pytest.fixture(params=["2", "all"])
def devices(request: pytest.FixtureRequest, world: World) -> Devices:
    """Returns the devices of a rank: two devices, or all four visible ones."""
    if runtime.config().devices_per_rank != {"2": 2, "all": 0}[request.param]:
        reopen(RINGJAX_DEVICES_PER_RANK=request.param)
    return Devices()


@pytest.fixture
def log(devices: Devices, module_log: NcclLog) -> NcclLog:
    module_log.take()
    return module_log


def arrays(place: int, size: int, step: int = 0) -> list[list[np.ndarray]]:
    """Returns the arrays of all ranks at one position, for each tensor."""
    return [draw(size, s, "float32", 10 * place + step) for s in (SMALL, (), LARGE)]


def test_the_devices_of_a_rank(devices: Devices, world: World) -> None:
    if runtime.config().devices_per_rank == 0:
        assert devices.numbers == [0, 1, 2, 3]
    else:  # the ranks of a host share its devices
        assert devices.numbers == [[0, 1], [2, 3]][world.rank % 2]
    assert [d.size for d in devices.all] == [world.size] * len(devices.all)


def test_a_call_finds_its_device_by_the_context(devices: Devices) -> None:
    for number in range(VISIBLE_DEVICES):
        mine = number in devices.numbers
        assert devices.here(number) == (number if mine else -1)
    assert devices.here(None) == -1  # without a current context there is no device
    assert _native.device_here(77) == -1


def test_devices_at_equal_positions_are_reduced(devices: Devices, world: World) -> None:
    def step(place: int, device: Device) -> list[np.ndarray]:
        out = []
        for number in range(4):
            stacks = arrays(place, world.size, number)
            mine = [xs[world.rank].copy() for xs in stacks]
            device.run("allreduce", mine, reduce="Average", name=f"step {number}")
            for x, xs in zip(mine, stacks, strict=True):
                equal(x, reduced("Average", xs), 1e-6)
            out += mine
        return out

    found = [[x.tobytes() for x in one] for one in devices.run_checked(step)]
    assert len({tuple(one) for one in found}) == len(found)  # devices have other data
    assert all(other == found for other in ringjax.allgather_object(found))


def test_every_operation_on_every_device(devices: Devices, world: World) -> None:
    size, rank = world.size, world.rank

    def body(place: int, device: Device) -> None:
        (xs,) = [draw(size, (2 * size, 3), "float32", place)]
        mine = xs[rank]
        out = np.zeros((size * 2 * size, 3), np.float32)
        device.run("allgather", [mine], [out], counts=[2 * size] * size)
        equal(out, np.concatenate(xs))
        part = np.zeros((2, 3), np.float32)
        device.run("reducescatter", [mine], [part], counts=[2] * size)
        equal(part, reduced("Sum", xs)[2 * rank : 2 * rank + 2])
        other = np.zeros_like(mine)
        device.run("alltoall", [mine], [other], counts=[2] * (2 * size))
        equal(other, np.concatenate([x[2 * rank : 2 * rank + 2] for x in xs]))
        copy = mine.copy()
        device.run("broadcast", [copy], root=size - 1)
        equal(copy, xs[size - 1])
        device.run("barrier")

    devices.run_checked(body)


def test_overlap_on_every_device(devices: Devices, world: World) -> None:
    def body(place: int, device: Device) -> None:
        for number in range(5):
            stacks = arrays(place, world.size, number)
            mine = [xs[world.rank].copy() for xs in stacks]
            for site, x in enumerate(mine):
                device.start([x], site=site, first=site == 0, name="bucket")
            for site, x in enumerate(mine):
                device.done([x], site=site)
            device.core.synchronize()
            for x, xs in zip(mine, stacks, strict=True):
                equal(x, reduced("Sum", xs))

    devices.run_checked(body)


def test_programs_over_some_devices_run_beside_others(
    devices: Devices, world: World
) -> None:
    """Devices make different numbers of calls, and ranks make them at other times."""

    def body(place: int, device: Device) -> None:
        for number in range(3 + 4 * place):
            x = np.full(7, world.rank + place + number, np.float32)
            device.run("allreduce", [x], name=f"of device {place}, {number}")
            assert (x == sum(r + place + number for r in range(world.size))).all()

    order = list(range(len(devices.all)))
    devices.run_checked(body, places=order[:: 1 if world.rank % 2 else -1])
    for place in order[world.rank % 2 :] + order[: world.rank % 2]:
        if world.size == 1 or place == 0:  # a device calls while the others are idle
            body(place, devices.all[place])
    devices.confirm()


def test_nccl_has_a_communicator_of_all_ranks_for_each_device(
    devices: Devices, log: NcclLog, world: World
) -> None:
    reopen()
    begun = [e for e in log.take() if e["function"] == "ncclCommInitRankConfig"]
    assert [e["size"] for e in begun] == [world.size] * len(devices.all)
    assert {e["rank"] for e in begun} == {world.rank}
    new = Devices()
    log.take()
    x = [np.ones(LARGE, np.float32) for _ in new.all]
    new.run_checked(lambda place, device: device.run("allreduce", [x[place]]))
    counts = [e["count"] for e in log.take() if e["function"] == "ncclAllReduce"]
    # Each device sends its part once. A single rank sends nothing.
    assert counts == ([] if world.size == 1 else [LARGE[0]] * len(new.all))


def test_a_commit_waits_for_all_devices(devices: Devices) -> None:
    last = len(devices.all) - 1
    stream = DefaultStream(devices.numbers[last])
    release = stream.hold()
    x = np.ones(3, np.float32)
    devices.run_checked(
        lambda place, device: device.enqueue("allreduce", [x.copy(), x])
    )
    ended = threading.Event()
    errors: list[BaseException] = []

    def commit() -> None:
        try:
            devices.confirm()
        except BaseException as error:
            errors.append(error)
        ended.set()

    thread = threading.Thread(target=commit)
    thread.start()
    must_wait = (
        devices.all[0].size > 1 or devices.all[0].stats("allreduce")["launches"] > 0
    )
    assert ended.wait(0.2) is not must_wait
    release()
    thread.join(20)
    stream.finish()
    stream.close()
    assert ended.is_set()
    assert errors == []


def test_statistics_count_the_calls_of_one_device(
    devices: Devices, world: World
) -> None:
    """Calls are counted once, because devices work in parallel; bytes are summed."""
    reopen()
    mine = Devices()

    def step(place: int, device: Device) -> None:
        device.run("allreduce", [np.ones(100 + place, np.float32)], name="grads")

    for _ in range(3):
        mine.run_checked(step)
    mine.confirm()
    if world.size == 1:  # a single rank compares nothing
        return
    found = ringjax.stats()["process_sets"]
    assert list(found) == [0]
    assert found[0]["compiled"]["allreduce"]["calls"] == 3
    count = len(mine.all)
    sent = sum(4 * (100 + place) for place in range(count))
    assert found[0]["compiled"]["allreduce"]["bytes"] == 3 * sent
    calls = [one for one in ringjax.recent_calls() if one["name"] == "grads"]
    assert [(one["set"], one["bytes"]) for one in calls] == [(0, 400)] * 3


def test_process_sets_contain_all_devices_of_their_ranks(
    devices: Devices, world: World
) -> None:
    members = list(range(max(1, world.size - 1)))
    some = ringjax.add_process_set(members)
    if world.rank in members:
        mine = Devices(some.process_set_id)
        assert mine.numbers == devices.numbers
        x: list[Any] = [
            np.full(9, world.rank + p, np.float32) for p in range(VISIBLE_DEVICES)
        ]
        mine.run_checked(lambda place, device: device.run("allreduce", [x[place]]))
        for place in range(len(mine.all)):
            assert (x[place] == sum(r + place for r in members)).all()
    ringjax.remove_process_set(some)
    devices.run_checked(lambda place, device: device.run("barrier"))
