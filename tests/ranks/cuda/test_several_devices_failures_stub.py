"""Processes with several CUDA devices, one of which fails, on stubs and not on a GPU.

If one device fails, all devices of all ranks must soon fail with an error that names
the device. Their results are void, nothing leaks, and `init` works again.
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

def report(errors):
    for place, error in enumerate(errors):
        text = error if isinstance(error, Exception) else "no error"
        print(f"device {place}: {text}", flush=True)

def wait_for_aborts(devices):
    # The watchdog of each device aborts it.
    while not all(device.core.aborted for device in devices.all):
        time.sleep(0.01)

def nothing_left():
    while lane_calls.live_resources() != (0, 0, 0):
        time.sleep(0.01)
    print("nothing left", flush=True)
"""
# The failure timeout is too long to end a test.
SETTINGS = {"RINGJAX_DEVICES_PER_RANK": "all", "RINGJAX_FAILURE_TIMEOUT": "60"}


def start(
    start_job: StartJob,
    np: int,
    script: str,
    env: dict[str, str] | None = None,
    **stubs: str | float,
) -> Job:
    stubs = {"CUDA_STUB_DEVICES": 2, **stubs}
    return stub_job(HEAD, start_job, np, script, SETTINGS | (env or {}), **stubs)


def caught(job: Job, rank: int, place: int) -> str:
    """Returns the text of the error of one device of a rank."""
    lines = job.output(rank).splitlines()
    (line,) = [x for x in lines if x.startswith(f"device {place}: ")]
    return line.partition(": ")[2]


@pytest.mark.parametrize("devices", [2, 4])
def test_several_worlds_in_one_process(start_job: StartJob, devices: int) -> None:
    job = start(
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
    assert job.wait(60) == 0, job.logs()
    for rank in range(2):
        assert job.output(rank).count("nothing left") == 3
        assert job.output(rank).count(f"works {devices}") == 3


def test_a_killed_rank_ends_all_devices(start_job: StartJob) -> None:
    job = start(
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
        report(devices.run(forever))
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
        job.wait_for(rank, "training")
    time.sleep(0.2)  # all ranks are in the middle of a step now
    killable_rank.kill(job, rank=1)
    for rank in (0, 2):
        job.wait_for(rank, "over")
    job.kill(rank=1)
    assert job.wait() == 128 + signal.SIGKILL, job.logs()
    for rank in (0, 2):
        for place in range(4):
            assert "rank 1" in caught(job, rank, place), job.logs()
        assert "confirm: 1" in job.output(rank), job.logs()
        assert "nothing left" in job.output(rank), job.logs()


@needs_kernels
@pytest.mark.parametrize(
    "function", ["ncclAllReduce", "ncclGroupEnd", "cuLaunchKernel", "cuEventRecord"]
)
def test_a_device_that_fails_fails_all(start_job: StartJob, function: str) -> None:
    """The call of the device raises, and enqueued results of all ranks are void."""
    variable = "CUDA_STUB_FAIL" if function.startswith("cu") else "NCCL_STUB_FAIL"
    job = start(
        start_job,
        2,
        f"""
        if rank == 1:
            os.environ["{variable}"] = "{function}"
        devices = begin()
        first, second = devices.all
        if rank == 1:
            runtime.current("test").exchange(0, "enqueued")
            errors = devices.run(step, places=[1])  # device 0 of this rank never calls
            print("own error:", errors[0], flush=True)
        else:
            mine = values()
            first.enqueue("allreduce", mine, name="grads")
            runtime.current("test").exchange(0, "enqueued")
            errors = devices.run(step, places=[1])
            wait_for_aborts(devices)
            stream = calls.DefaultStream(devices.numbers[0])
            stream.finish()
            assert all(np.isnan(x[0]) for x in mine), mine
            stream.close()
        wait_for_aborts(devices)
        report(devices.run(step))
        ringjax.shutdown()
        devices = begin()
        must_work(devices)
        ringjax.shutdown()
        del devices
        """,
    )
    assert job.wait(60) == 0, job.logs()
    assert function[4:] in job.output(1).partition("own error:")[2], job.logs()
    for rank in range(2):
        for place in range(2):
            text = caught(job, rank, place)
            assert "rank 1" in text, job.logs()
            assert "(its CUDA device 1)" in text, job.logs()
        assert "works 2" in job.output(rank), job.logs()


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_missing_device_is_named(start_job: StartJob, overlapped: bool) -> None:
    job = start(
        start_job,
        3,
        f"""
        devices = begin()
        must_work(devices)
        def body(place, device):
            if place == 1 and rank == 2:  # as if the program had failed on this device
                return None
            mine = values()
            if {overlapped}:
                device.start(mine, name="grads")
                device.done(mine)
            else:
                device.enqueue("allreduce", mine, name="grads")
            device.core.synchronize()
        errors = devices.run(body)
        wait_for_aborts(devices)
        report(errors)
        print("later:", *devices.run(step), flush=True)
        ringjax.shutdown()
        nothing_left()
        """,
        {"RINGJAX_COLLECTIVE_TIMEOUT": "2"},
    )
    assert job.wait(40) == 0, job.logs()
    for rank in range(3):
        text = caught(job, rank, 1)
        if rank == 2:
            assert text == "no error"  # rank 2 made no call
            text = job.output(2).partition("later:")[2]
        assert "world (device 1)" in text, job.logs()
        assert "rank 2" in text, job.logs()
        assert "has not called allreduce 'grads'" in text, job.logs()
        assert "for 2 s" in text, job.logs()


def test_devices_that_disagree_all_raise(start_job: StartJob) -> None:
    """Only calls of the second devices disagree, but the first devices fail, too."""
    job = start(
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
        report(devices.run(body))
        ringjax.shutdown()
        nothing_left()
        """,
        {"RINGJAX_COLLECTIVE_TIMEOUT": "10"},
    )
    assert job.wait(40) == 0, job.logs()
    for rank in range(2):
        for place in range(2):
            text = caught(job, rank, place)
            assert "f32[3]" in text, job.logs()
            assert "f32[4]" in text, job.logs()
            assert "device 1" in text, job.logs()


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
def test_unusable_devices_are_refused_on_all_ranks(
    start_job: StartJob, text: str
) -> None:
    job = start(
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
    assert job.wait() == 0, job.logs()
    for rank in range(3):
        error = job.output(rank).partition("refused:")[2]
        if "CUDA device 1" in text:  # devices connect concurrently, so either may fail
            assert "CUDA device" in error, job.logs()
            assert text.split()[-1] in error, job.logs()
        else:
            assert text in error, job.logs()


def test_two_ranks_that_see_the_same_devices(start_job: StartJob) -> None:
    job = start(
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
    assert job.wait() == 0, job.logs()
    for rank in range(2):
        assert "rank 0 and rank 1 compute on the same GPU" in job.output(rank)


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
def test_an_elastic_job_replaces_a_lost_rank(start_job: StartJob) -> None:
    """In each epoch, all devices of the members are connected again."""
    limits = ["--min-np", "2", "--max-np", "3"]
    job = start(partial(start_job, options=limits), 3, ELASTIC)
    assert job.wait(90) == 0, job.logs()
    for worker in (0, 2, 3):
        lines = job.output(worker).splitlines()
        (end,) = [line.split() for line in lines if line.startswith("finished")]
        assert int(end[1]) >= 40, job.logs()
        assert end[2] == "3", job.logs()
        begins = [line for line in lines if line.startswith("begins")]
        assert begins[-1].split()[2:] == ["0", "2", "3"], job.logs()
        assert worker == 3 or begins[0] == "begins 0 0 1 2", job.logs()


@needs_kernels
def test_only_a_newcomer_with_other_devices_fails(start_job: StartJob) -> None:
    """The members continue and accept the next newcomer."""
    limits = ["--min-np", "2", "--max-np", "3"]
    job = start(partial(start_job, options=limits), 3, ELASTIC, {"LAST": "4"})
    assert job.wait(90) == 0, job.logs()
    assert "rank 0 has 2 (0, 1) and rank 2 has 3 (0, 1, 2)" in job.logs()
    for worker in (0, 2, 4):
        assert "finished" in job.output(worker), job.logs()
    assert "finished" not in job.output(3), job.logs()
