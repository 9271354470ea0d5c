"""Elastic jobs whose collectives use NCCL, on stubs and not on a GPU.

A loss makes the results of unfinished NCCL operations void. All survivors must soon
raise an error, connect their devices again, and continue from the last commit. The
parameters must be the sum of complete steps only.

JAX does not see the device of the stubs. So the training function calls the current
communicator by its number in every step, as a compiled program does.
"""

from __future__ import annotations

from functools import partial

import pytest
from support.device_code import needs_kernels
from support.launch import Job, StartJob
from support.stub_processes import stub_job

# Void results are marked by a kernel, so the tests need kernels.
pytestmark = [needs_kernels, pytest.mark.timeout(150)]

HEAD = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from support import device_calls as calls
from support import lane_calls
import ringjax
from ringjax import _native, elastic, errors, runtime

WORKER = int(os.environ["RINGJAX_WORKER"])
SIZES = (3, 5, 1 << 19)  # two small arrays that are packed, and a large one in place

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def die():
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(done):
    while not done():
        time.sleep(1e-3)

def total():
    return sum(2.0**w for w in runtime.epoch_info().workers)

def train(step, ends, state=None, before=lambda state: None):
    say("started")
    state = state or elastic.State(
        step=0, params=[np.zeros(n, np.float32) for n in SIZES], expected=0.0)

    @elastic.run(warm_up=step)
    def loop(state):
        workers = runtime.epoch_info().workers
        say("begins", state.step, runtime.epoch_info().kind, *workers)
        say("at", f"{time.time():.3f}")
        while not ends(state, set(runtime.epoch_info().workers)):
            time.sleep(0.01)  # the rest of a step; newcomers need time to start
            epoch = runtime.epoch_info().epoch
            before(state)
            sums = step(state)
            void = [bool(np.isnan(x).any()) for x in sums]
            right = [bool((x == total()).all()) for x in sums]
            # Any other value would be taken for a result.
            assert all(v or r for v, r in zip(void, right)), [x[:2] for x in sums]
            if any(void):  # this step outlasts the change to the next epoch
                wait_for(lambda: runtime.epoch_info().epoch > epoch)
                time.sleep(0.2)
            for param, x in zip(state.params, sums):
                param += x
            state.expected += total()
            state.step += 1
            say("step", state.step, "void" if any(void) else "right")
            if any(void): say("at", f"{time.time():.3f}")
            state.commit()
            say("committed", state.step, f"{time.time():.3f}")
        return state

    done = loop(state)
    for param in done.params:
        assert (param == done.expected).all(), (param[:3], done.expected)
    say("finished", done.step, done.expected, ringjax.size())
    ringjax.shutdown()
"""

DEVICE = """
calls.open_at_init()
ringjax.init()
stream = calls.DefaultStream((runtime.current("test").device_share or (0,))[0])

def step(state):
    device = calls.Device()
    sums = [np.full(n, 2.0**WORKER, np.float32) for n in SIZES]
    try:
        device.start(sums[2:], site=0, name="bucket")
        device.enqueue("allreduce", sums[:2], name="grads")
        device.done(sums[2:], site=0)
    except _native.StatusError as error:
        raise errors.from_status(error) from error
    stream.finish()  # `core.synchronize` would raise; results of a program do not
    return sums
"""


def start(
    start_job: StartJob,
    np: int,
    script: str,
    *,
    head: str = HEAD + DEVICE,
    env: dict[str, str] | None = None,
    **stubs: str | float,
) -> Job:
    limits = ["--min-np", "1", "--max-np", str(np)]
    return stub_job(head, partial(start_job, options=limits), np, script, env, **stubs)


def printed(job: Job, worker: int, word: str) -> list[list[str]]:
    """Returns the other words of each line that begins with `word`."""
    lines = job.output(worker).splitlines()
    return [line.split()[1:] for line in lines if line.split(" ")[0] == word]


def check(job: Job, workers: int) -> None:
    """Checks that steps are committed once and in order, and the ends are equal."""
    ends = set()
    for worker in range(workers):
        steps = [int(words[0]) for words in printed(job, worker, "committed")]
        assert len(steps) == len(set(steps)), job.logs()
        assert steps == sorted(steps), job.logs()
        ends |= {tuple(words) for words in printed(job, worker, "finished")}
    assert len(ends) == 1, job.logs()


def test_killed_workers_are_replaced(start_job: StartJob) -> None:
    """Kills a worker between steps, then rank 0, then a worker while NCCL connects."""
    job = start(
        start_job,
        3,
        """
        ringjax.add_process_set([1])  # its only member is killed
        connect = _native.connect_devices

        def maybe_die(**options):
            if WORKER == 2 and runtime.epoch_info().workers[0] == 2:
                die()
            return connect(**options)

        if WORKER == 2:
            _native.connect_devices = maybe_die

        def before(state):
            workers = runtime.epoch_info().workers
            if WORKER == 1 and state.step == 5:
                die()
            if WORKER == 0 and len(workers) == 3 and workers[2] == 3:
                die()

        train(step, lambda state, workers: min(workers) > 2 and len(workers) > 1,
              before=before)
        """,
    )
    assert job.wait(120) == 0, job.logs()
    check(job, 6)
    kinds = [words[1:] for words in printed(job, 3, "begins")]
    assert kinds[0] == ["resize", "0", "2", "3"], job.logs()
    assert ["restart", "3"] in kinds, job.logs()
    # The survivors of the first loss continued from their last commit.
    assert printed(job, 0, "begins")[1] == ["5", "restart", "0", "2"], job.logs()


def test_a_rank_leaves_and_its_process_set_shrinks(start_job: StartJob) -> None:
    job = start(
        start_job,
        3,
        """
        both = ringjax.add_process_set([1, 2])

        def before(state):
            world = runtime.current("test")
            assert calls.Device().core.device == WORKER
            assert world.device_share == (WORKER,)
            workers = runtime.epoch_info().workers
            members = [w for w in workers if w > 0]
            if WORKER > 0 and state.step % 2:
                x = np.full(7, 2.0**WORKER, np.float32)
                calls.Device(both.process_set_id).enqueue("allreduce", [x])
                stream.finish()
                assert (x == sum(2.0**w for w in members)).all(), x
            if state.step == 9 and WORKER == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        train(step, lambda state, workers: 1 not in workers and state.step % 5 == 0,
              before=before)
        """,
        CUDA_STUB_DEVICES=3,
    )
    assert job.wait(120) == 0, job.logs()
    check(job, 3)
    for worker in (0, 2):
        assert ["0", "2"] in [words[2:] for words in printed(job, worker, "begins")]
        assert all(words[1] == "right" for words in printed(job, worker, "step"))
    assert not printed(job, 1, "finished"), job.logs()


def test_an_nccl_failure_on_one_rank(start_job: StartJob) -> None:
    """Kills a rank while NCCL connects in `init`; later NCCL fails on another rank."""
    job = start(
        start_job,
        4,
        """
        def before(state):
            if state.step == 5 and WORKER == 3:
                die()

        train(step, lambda state, workers: state.step == 30, before=before)
        """,
        head=HEAD
        + """
connect = _native.connect_devices

def maybe_die(**options):
    if WORKER == 1:
        die()
    return connect(**options)

_native.connect_devices = maybe_die
if WORKER == 2:  # fails in the third epoch: worker 1 was lost, then worker 3
    os.environ["NCCL_STUB_FAIL"] = "ncclCommInitRankConfig:3"
"""
        + DEVICE,
    )
    assert job.wait(120) == 0, job.logs()
    check(job, 4)
    assert "ncclCommInitRankConfig" in job.output(2), job.logs()
    assert printed(job, 0, "finished")[0][0] == "30"


EAGER = """
lane_calls.without_jax()
ringjax.init()
del sys.modules["torch"]  # the empty stand-in has no attributes to query
stream = calls.DefaultStream()

def submit():
    end = lane_calls.LaneClient()
    ins = [np.full(n, 2.0**WORKER, np.float32) for n in SIZES]
    pending = [end.submit("allreduce", f"x{i}", [x]) for i, x in enumerate(ins)]
    for operation in pending:
        operation.ticket.wait(stream=0)  # until the operation is enqueued
    return [operation.outs[0] for operation in pending]

def step(state):
    try:
        sums = submit()
    except _native.StatusError as error:
        raise errors.from_status(error) from error
    stream.finish()  # like a program that uses the results on its stream
    return sums
"""


def test_tensors_of_other_frameworks(start_job: StartJob) -> None:
    job = start(
        start_job,
        3,
        """
        def before(state):
            if state.step == 5 and WORKER == 1:
                stream.hold()  # the operation never starts on this rank
                submit()
                die()

        train(step, lambda state, workers: state.step >= 20 and 1 not in workers,
              before=before)
        """,
        head=HEAD + EAGER,
    )
    assert job.wait(120) == 0, job.logs()
    check(job, 4)
    for worker in (0, 2):
        assert printed(job, worker, "begins")[1] == ["5", "restart", "0", "2"], (
            job.logs()
        )
        assert ["6", "void"] in printed(job, worker, "step"), job.logs()


def test_a_rank_that_never_calls(start_job: StartJob) -> None:
    job = start(
        start_job,
        3,
        """
        def before(state):
            if state.step == 5 and WORKER == 1:
                time.sleep(1000)

        train(step, lambda state, workers: state.step >= 20 and 1 not in workers,
              before=before)
        """,
        env={"RINGJAX_COLLECTIVE_TIMEOUT": "2"},
    )
    assert job.wait(120) == 0, job.logs()
    check(job, 4)
