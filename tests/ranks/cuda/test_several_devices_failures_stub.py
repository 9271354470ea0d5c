"""Several CUDA devices a process, and one of them that fails: no GPU tests.

An error of one device is an error of all devices of all ranks, soon, and says which it
was; their results are void; nothing is left behind, and a world can be formed again.
"""

from __future__ import annotations

import signal
import time
from functools import partial

import pytest
from support import killable_rank
from support.device_code import needs_kernels
from support.launch import Job, StartJob
from support.stub_processes import stub_job

HEAD = """
import os, signal, sys, threading, time
import numpy as np
from support import device_calls as calls
from support import lane_calls, killable_rank
from support.several_devices import Devices
import ringjax
from ringjax import runtime

calls.open_at_init()
rank, size = (int(os.environ["RINGJAX_" + x]) for x in ("RANK", "SIZE"))

def begin():
    ringjax.init()
    return Devices()

def values():
    return [np.ones(3, np.float32), np.ones(1 << 19, np.float32)]

def step(place, device):
    mine = values()
    device.run("allreduce", mine, reduce="Average", name="grads")
    return mine

def must_work(devices, count=2):
    for _ in range(count):
        for mine in devices.run_checked(step):
            assert all((x == 1).all() for x in mine)
    print("works", len(devices.all), flush=True)

def tell(errors):
    for place, error in enumerate(errors):
        what = error if isinstance(error, Exception) else "no error"
        print(f"device {place}: {what}", flush=True)

def all_end(devices):
    # the watchdogs tell each device
    while not all(device.core.aborted for device in devices.all):
        time.sleep(0.01)

def nothing_left():
    while lane_calls.live_resources() != (0, 0, 0):
        time.sleep(0.01)
    print("nothing left", flush=True)
"""
# A loss that only silence would tell of is noticed too late for the test.
SETTINGS = {"RINGJAX_DEVICES_PER_RANK": "all", "RINGJAX_FAILURE_TIMEOUT": "60"}


def job(
    start: StartJob,
    np: int,
    script: str,
    env: dict[str, str] | None = None,
    **stubs: str | float,
) -> Job:
    stubs = {"CUDA_STUB_DEVICES": 2, **stubs}
    return stub_job(HEAD, start, np, script, SETTINGS | (env or {}), **stubs)


def caught(one: Job, rank: int, place: int) -> str:
    """The text of the error that a device of a rank met."""
    lines = one.output(rank).splitlines()
    (line,) = [x for x in lines if x.startswith(f"device {place}: ")]
    return line.partition(": ")[2]


@pytest.mark.parametrize("devices", [2, 4])
def test_worlds_one_after_the_other(start_job: StartJob, devices: int) -> None:
    one = job(
        start_job,
        2,
        """
        for _ in range(3):
            devices = begin()
            must_work(devices)
            for place, device in enumerate(devices.all):
                device.start([np.ones(5, np.float32)], site=place)
                device.done(site=place)
            ringjax.shutdown()
            del devices, device
            nothing_left()
        """,
        CUDA_STUB_DEVICES=devices,
    )
    assert one.wait(60) == 0, one.logs()
    for rank in range(2):
        assert one.output(rank).count("nothing left") == 3
        assert one.output(rank).count(f"works {devices}") == 3


def test_a_killed_rank_ends_all_devices(start_job: StartJob) -> None:
    one = job(
        start_job,
        3,
        """
        if rank == 1:
            killable_rank.run_in_child()
        devices = begin()
        must_work(devices)
        def forever(place, device):
            while True:
                step(place, device)
        print("training", flush=True)
        tell(devices.run(forever))
        assert all(device.core.aborted for device in devices.all)
        try:
            devices.confirm()
        except ringjax.errors.PeerLost as error:
            print("confirm:", error.rank, flush=True)
        ringjax.shutdown()
        nothing_left()
        os.environ.update(RINGJAX_RANK="0", RINGJAX_SIZE="1")
        must_work(begin())
        ringjax.shutdown()
        print("over", flush=True)
        """,
        CUDA_STUB_DEVICES=4,
    )
    for rank in range(3):
        one.wait_for(rank, "training")
    time.sleep(0.2)  # until they are in the middle of it
    killable_rank.kill(one, rank=1)
    for rank in (0, 2):
        one.wait_for(rank, "over")
    one.kill(rank=1)
    assert one.wait() == 128 + signal.SIGKILL, one.logs()
    for rank in (0, 2):
        for place in range(4):
            assert "rank 1" in caught(one, rank, place), one.logs()
        assert "confirm: 1" in one.output(rank), one.logs()
        assert "nothing left" in one.output(rank), one.logs()


@needs_kernels
@pytest.mark.parametrize(
    "function", ["ncclAllReduce", "ncclGroupEnd", "cuLaunchKernel", "cuEventRecord"]
)
def test_a_device_that_fails_fails_all(start_job: StartJob, function: str) -> None:
    """Its call raises, and what others have enqueued is void, on all ranks."""
    variable = "CUDA_STUB_FAIL" if function.startswith("cu") else "NCCL_STUB_FAIL"
    one = job(
        start_job,
        2,
        f"""
        if rank == 1:
            os.environ["{variable}"] = "{function}"
        devices = begin()
        first, second = devices.all
        if rank == 1:
            runtime.current("test").exchange(0, "enqueued")
            errors = devices.run(step, places=[1])  # the first one's part never begins
            print("struck:", errors[0], flush=True)
        else:
            mine = values()
            first.enqueue("allreduce", mine, name="grads")
            runtime.current("test").exchange(0, "enqueued")
            errors = devices.run(step, places=[1])
            all_end(devices)
            stream = calls.DefaultStream(devices.numbers[0])
            stream.finish()
            assert all(np.isnan(x[0]) for x in mine), mine
            stream.close()
        all_end(devices)
        tell(devices.run(step))
        ringjax.shutdown()
        devices = begin()
        must_work(devices)
        ringjax.shutdown()
        del devices
        """,
    )
    assert one.wait(60) == 0, one.logs()
    assert function[4:] in one.output(1).partition("struck:")[2], one.logs()
    for rank in range(2):
        for place in range(2):
            text = caught(one, rank, place)
            assert "rank 1" in text, one.logs()
            assert "(its CUDA device 1)" in text, one.logs()
        assert "works 2" in one.output(rank), one.logs()


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_device_that_does_not_come_is_named(
    start_job: StartJob, overlapped: bool
) -> None:
    one = job(
        start_job,
        3,
        f"""
        devices = begin()
        must_work(devices)
        def body(place, device):
            if place == 1 and rank == 2:  # its part of the program has failed before
                return None
            mine = values()
            if {overlapped}:
                device.start(mine, name="grads")
                device.done(mine)
            else:
                device.enqueue("allreduce", mine, name="grads")
            device.core.synchronize()
        errors = devices.run(body)
        all_end(devices)
        tell(errors)
        print("later:", *devices.run(step), flush=True)
        ringjax.shutdown()
        nothing_left()
        """,
        {"RINGJAX_COLLECTIVE_TIMEOUT": "2"},
    )
    assert one.wait(40) == 0, one.logs()
    for rank in range(3):
        text = caught(one, rank, 1)
        if rank == 2:
            assert text == "no error"  # rank 2 made no call
            text = one.output(2).partition("later:")[2]
        assert "world (device 1)" in text, one.logs()
        assert "rank 2" in text, one.logs()
        assert "has not called allreduce 'grads'" in text, one.logs()
        assert "for 2 s" in text, one.logs()


def test_devices_that_do_not_agree(start_job: StartJob) -> None:
    """The second devices call other things: the first ones end as well."""
    one = job(
        start_job,
        2,
        """
        devices = begin()
        must_work(devices)
        def body(place, device):
            x = np.ones(3 + place * rank, np.float32)
            device.run("allreduce", [x], name="grads")
            while not device.core.aborted:
                device.run("allreduce", [np.ones(3, np.float32)], name="more")
            device.core.check()
        tell(devices.run(body))
        ringjax.shutdown()
        nothing_left()
        """,
        {"RINGJAX_COLLECTIVE_TIMEOUT": "10"},
    )
    assert one.wait(40) == 0, one.logs()
    for rank in range(2):
        for place in range(2):
            text = caught(one, rank, place)
            assert "f32[3]" in text, one.logs()
            assert "f32[4]" in text, one.logs()
            assert "device 1" in text, one.logs()


REFUSED = {
    "all ranks must compute on equally many CUDA devices, but rank 0 has 2 (0, 1) and "
    "rank 1 has 4 (0, 1, 2, 3)": 'CUDA_STUB_DEVICES="4"',
    "RINGJAX_DEVICES_PER_RANK is 3 on rank 1, which computes on 2 (0, 1)": (
        'RINGJAX_DEVICES_PER_RANK="3"'
    ),
    "CUDA device 1: ncclCommInitRankConfig": (
        'NCCL_STUB_FAIL="ncclCommInitRankConfig:2"'
    ),
    "CUDA device 1: cuModuleLoadData": 'CUDA_STUB_FAIL="cuModuleLoadData:2"',
}


@needs_kernels
@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_fit_together_is_refused_on_all_ranks(
    start_job: StartJob, text: str
) -> None:
    one = job(
        start_job,
        3,
        f"""
        if rank == 1:
            os.environ.update({REFUSED[text]})
        try:
            begin()
        except ringjax.errors.StartupError as error:
            print("refused:", error, flush=True)
        ringjax.shutdown()
        nothing_left()
        """,
    )
    assert one.wait() == 0, one.logs()
    for rank in range(3):
        said = one.output(rank).partition("refused:")[2]
        if "CUDA device 1" in text:  # threads of NCCL come in any order
            assert "CUDA device" in said, one.logs()
            assert text.split()[-1] in said, one.logs()
        else:
            assert text in said, one.logs()


def test_two_ranks_that_see_the_same_devices(start_job: StartJob) -> None:
    one = job(
        start_job,
        2,
        """
        try:
            begin()
        except ringjax.errors.StartupError as error:
            print("refused:", error, flush=True)
        ringjax.shutdown()
        """,
        CUDA_STUB_UUID="the-same",
    )
    assert one.wait() == 0, one.logs()
    for rank in range(2):
        assert "rank 0 and rank 1 compute on the same GPU" in one.output(rank)


ELASTIC = """
from ringjax import _native, elastic, errors
WORKER = int(os.environ["RINGJAX_WORKER"])
LAST = int(os.environ.get("LAST", 3))
if LAST > 3 and WORKER == 3:
    os.environ["CUDA_STUB_DEVICES"] = "3"

def train():
    state = elastic.State(step=0, params=np.zeros(2, np.float32), expected=0.0)

    @elastic.run
    def loop(state):
        workers = runtime.epoch_info().workers
        print("begins", state.step, *workers, flush=True)
        while state.step < 40 or LAST not in workers:
            if WORKER == 1 and state.step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            devices = Devices()
            def reduce(place, device):
                x = [np.full(3, 2.0**WORKER, np.float32)]
                try:
                    device.enqueue("allreduce", x, name="grads")
                except _native.StatusError as error:
                    raise errors.from_status(error) from error
                return x
            sums = devices.run_checked(reduce)
            for number in devices.numbers:
                stream = calls.DefaultStream(number)
                stream.finish()
                stream.close()
            total = sum(2.0**w for w in workers)
            for (x,) in sums:
                assert np.isnan(x[0]) or (x == total).all(), (x, total)
            state.params = state.params + [x[0] for (x,) in sums]
            state.expected += total
            state.step += 1
            state.commit()
        return state

    done = loop(state)
    assert (done.params == done.expected).all(), (done.params, done.expected)
    print("finished", done.step, ringjax.size(), flush=True)
    ringjax.shutdown()

ringjax.init()
train()
"""


@needs_kernels
def test_an_elastic_job_loses_a_rank_and_takes_another(start_job: StartJob) -> None:
    """The devices of those who are there are joined anew, all of them."""
    limits = ["--min-np", "2", "--max-np", "3"]
    one = job(partial(start_job, options=limits), 3, ELASTIC)
    assert one.wait(90) == 0, one.logs()
    for worker in (0, 2, 3):
        lines = one.output(worker).splitlines()
        (end,) = [line.split() for line in lines if line.startswith("finished")]
        assert int(end[1]) >= 40, one.logs()
        assert end[2] == "3", one.logs()
        begins = [line for line in lines if line.startswith("begins")]
        assert begins[-1].split()[2:] == ["0", "2", "3"], one.logs()
        assert worker == 3 or begins[0] == "begins 0 0 1 2", one.logs()


@needs_kernels
def test_a_newcomer_with_other_devices_ends_alone(start_job: StartJob) -> None:
    """The members continue and accept the next newcomer."""
    limits = ["--min-np", "2", "--max-np", "3"]
    one = job(partial(start_job, options=limits), 3, ELASTIC, {"LAST": "4"})
    assert one.wait(90) == 0, one.logs()
    assert "rank 0 has 2 (0, 1) and rank 2 has 3 (0, 1, 2)" in one.logs()
    for worker in (0, 2, 4):
        assert "finished" in one.output(worker), one.logs()
    assert "finished" not in one.output(3), one.logs()
