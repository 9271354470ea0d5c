"""The eager lane through the native binding, on real ranks, without a framework.

These tests are about the binding, and about processes that end or fork.
tests/native/eager_*_test.cc tests the lane itself, and test_eager.py the Python API.
"""

from __future__ import annotations

import gc
import os
import re
import time
import weakref
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from support.launch import StartJob

import ringjax
from ringjax import _native, runtime

pytestmark = pytest.mark.launch("core")
OPS, DTYPES = _native.COLLECTIVES, _native.DTYPES
KINDS = {"f": "f", "i": "i", "u": "u", "c": "c", "b": "bool"}
Array = np.ndarray[Any, Any]


class ArrayOwner:
    """The owner of the arrays of a submission. A weakref shows when it is released."""

    def __init__(self, *arrays: Array) -> None:
        self.arrays = arrays


def describe(x: Array) -> tuple[int, int, tuple[int, ...]]:
    """Returns address, dtype and shape of an array, as `submit` expects them."""
    kind = KINDS[x.dtype.kind]
    bits = "" if kind == "bool" else str(8 * x.dtype.itemsize)
    return x.ctypes.data, DTYPES[kind + bits], x.shape


def allreduce(
    x: Array,
    name: str,
    process_set: runtime.ProcessSet = runtime.global_process_set,
    **options: Any,
) -> tuple[_native.Ticket, Array]:
    """Submits an allreduce; returns its ticket and the array that receives the sum."""
    out = np.empty_like(x)
    ticket = runtime.lane(process_set).submit(
        OPS["allreduce"],
        name,
        [describe(x)],
        [out.ctypes.data],
        keep=ArrayOwner(x, out),
        **options,
    )
    return ticket, out


def total(value: float, **options: Any) -> float:
    """Returns the sum of `value` over the ranks."""
    ticket, out = allreduce(np.full(5, value), "total", **options)
    ticket.wait()
    assert ticket.done
    assert (out == out[0]).all()
    return float(out[0])


@pytest.mark.ranks(3)
def test_results_allocated_by_the_core() -> None:
    ringjax.init()
    rank, size, lane = ringjax.rank(), ringjax.size(), runtime.lane()
    x = np.full((rank + 1, 2), rank, np.int16)
    ticket = lane.submit(OPS["allgather"], "g", [describe(x)], [], keep=x)
    ticket.wait()
    gathered = np.asarray(ticket.output(0))
    del ticket  # the array must keep its memory alive
    gc.collect()
    assert gathered.dtype == np.int16
    expected = np.concatenate([np.full((r + 1, 2), r) for r in range(size)])
    assert (gathered == expected).all()

    z = np.arange(size * (rank + 1), dtype=np.complex128)
    splits = [rank + 1] * size
    ticket = lane.submit(OPS["alltoall"], "a", [describe(z)], [], splits=splits, keep=z)
    ticket.wait()
    assert ticket.received(0) == list(range(1, size + 1))
    got = np.from_dlpack(ticket.output(0))
    expected = np.concatenate(
        [np.arange(rank * (r + 1), (rank + 1) * (r + 1)) for r in range(size)]
    )
    assert (got == expected).all()
    with pytest.raises(IndexError):
        ticket.output(1)


@pytest.mark.ranks(2)
def test_references_are_released_after_completion() -> None:
    ringjax.init()
    x, out = np.ones(4), np.empty(4)
    owner = ArrayOwner(x, out)
    reference = weakref.ref(owner)
    if ringjax.rank() == 0:
        runtime.lane().submit(0, "late", [describe(x)], [out.ctypes.data], keep=owner)
        del owner
        gc.collect()
        # The ticket is gone, but the operation is still pending.
        assert reference() is not None
    other, _ = allreduce(np.ones(1), "other")
    other.wait()
    if ringjax.rank() == 1:
        ticket, _ = allreduce(x, "late")
        ticket.wait()
    else:
        until = time.monotonic() + 20
        while reference() is not None and time.monotonic() < until:
            # Reading `done` of any ticket releases the owners of completed operations.
            assert other.done
            time.sleep(0.01)
        assert reference() is None
        assert (out == 2).all()


@pytest.mark.ranks(3)
def test_every_process_set_has_its_own_lane() -> None:
    ringjax.init()
    rank = ringjax.rank()
    some = ringjax.add_process_set([0, 2])
    everywhere, out = allreduce(np.ones(2), "x")
    if rank == 1:
        with pytest.raises(ValueError, match="does not include this rank"):
            runtime.lane(some)
    else:
        assert total(rank + 1.0, process_set=some) == 4
        assert runtime.lane(some).size == 2
    everywhere.wait()
    assert (out == 3).all()
    ringjax.remove_process_set(some)
    with pytest.raises(ValueError, match="not registered"):
        runtime.lane(some)
    assert total(1.0) == 3


@pytest.mark.ranks(2, isolated=True)
def test_shutdown_fails_pending_operations_and_init_works_again() -> None:
    for turn in range(4):
        ringjax.init()
        rank = ringjax.rank()
        assert total(1.0) == 2
        pending, _ = allreduce(np.ones(3), f"only rank {rank} has it in {turn}")
        lane = runtime.lane()
        ringjax.shutdown()
        with pytest.raises(_native.StatusError, match="rank|shut down"):
            pending.wait()
        with pytest.raises(_native.StatusError):
            lane.submit(OPS["barrier"], "late", [], [])


@pytest.mark.ranks(2)
def test_a_forked_child_cannot_use_the_lane() -> None:
    ringjax.init()
    lane = runtime.lane()
    assert total(1.0) == 2
    child = os.fork()
    if child == 0:
        code = 1
        try:
            lane.submit(OPS["barrier"], "child", [], [])
        except _native.StatusError as error:
            lane.close()
            code = 0 if "forked" in str(error) else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert total(1.0) == 2


HEAD = """
import sys, time
import numpy as np
import ringjax
from ringjax import _native, runtime

ringjax.init()
rank, size = ringjax.rank(), ringjax.size()
lane = runtime.lane()

def submit(name):
    x = np.ones(4)
    place = (x.ctypes.data, _native.DTYPES["f64"], x.shape)
    return lane.submit(0, name, [place], [x.ctypes.data], keep=x)

submit("first").wait()
"""

WAITING = (
    HEAD
    + """
tickets = [] if rank == 1 else [submit(f"pending {i}") for i in range(100)]
try:
    print("ready", flush=True)
    if rank == 1:
        time.sleep(60)
    tickets[0].wait()
except BaseException as error:
    print(f"caught: {type(error).__name__} {error}", flush=True)
    for ticket in tickets:
        try:
            ticket.wait()
            print("no error", flush=True)
        except _native.StatusError:
            pass
    try:
        submit("later").wait()
    except _native.StatusError as error:
        print(f"later: {error.code}", flush=True)
    print("all failed", flush=True)
"""
)


def test_a_killed_rank_fails_waiting_operations(start_job: StartJob) -> None:
    # The others detect the kill by closed connections: the timeout for silence is long.
    job = start_job(3, WAITING, env={"RINGJAX_FAILURE_TIMEOUT": "1000"})
    for rank in range(3):
        job.wait_for(rank, "ready")
    job.kill(rank=1)
    for rank in (0, 2):
        job.wait_for(rank, "all failed")
        text = job.output(rank).partition("caught: ")[2]
        assert "allreduce 'pending 0' (f64[4], SUM): rank 1 " in text
        assert "later: UNAVAILABLE" in text
        assert "no error" not in text
    job.wait(30)


def test_a_rank_that_leaves_is_named(start_job: StartJob) -> None:
    script = dedent(
        """
        if rank == 1:
            sys.exit(0)
        try:
            submit("with all").wait()
        except _native.StatusError as error:
            print("caught:", error.code, error, flush=True)
        """
    )
    job = start_job(3, HEAD + script)
    assert job.wait(30) == 0, job.logs()
    for rank in (0, 2):
        assert "caught: UNAVAILABLE" in job.output(rank)
        assert "rank 1 " in job.output(rank)


def test_a_late_rank_fails_one_operation_only(
    start_job: StartJob, tmp_path: Path
) -> None:
    script = dedent(
        """
        import os
        if rank == 0:
            try:
                submit("late").wait()
            except _native.StatusError as error:
                print("caught:", error.code, error, flush=True)
            open(os.environ["DONE_FILE"], "w").close()
        while not os.path.exists(os.environ["DONE_FILE"]):
            time.sleep(0.01)
        submit("last").wait()
        print("continued", flush=True)
        """
    )
    timeouts = {"RINGJAX_STALL_WARNING": "0.3", "RINGJAX_COLLECTIVE_TIMEOUT": "4"}
    done_file = {"DONE_FILE": str(tmp_path / "done")}
    job = start_job(2, HEAD + script, env=timeouts | done_file)
    assert job.wait(30) == 0, job.logs()
    text = "rank 1 has not submitted allreduce 'late' (f64[4], SUM) for "
    assert f"caught: DEADLINE_EXCEEDED RINGJAX[world, epoch 0]: {text}4 s" in (
        job.output(0)
    )
    warning = rf"{re.escape(text)}[\d.]+ s; .*; still waiting\n"
    assert re.search(warning, job.output(0)), job.logs()
    for rank in range(2):
        assert "continued" in job.output(rank)


def test_a_warning_names_some_of_many(start_job: StartJob, tmp_path: Path) -> None:
    script = dedent(
        """
        import os
        tickets = [submit(f"n{i}") for i in range(20)] if rank == 0 else []
        if rank == 1:
            while not os.path.exists(os.environ["WARNED"]):
                time.sleep(0.01)
            tickets = [submit(f"n{i}") for i in range(20)]
        for ticket in tickets:
            ticket.wait()
        """
    )
    warned = tmp_path / "warned"
    env = {"RINGJAX_STALL_WARNING": "0.5", "WARNED": str(warned)}
    job = start_job(2, HEAD + script, env=env)
    # Rank 0 prints a warning only after the reply of the late rank, so rank 1 waits for
    # the warning and not for a fixed time.
    job.wait_for(0, " more operations")
    warned.touch()
    assert job.wait(30) == 0, job.logs()
    # If rank 1 starts slowly, there is a warning about "first", too.
    mark = "has not submitted allreduce 'n"
    warnings = [x for x in job.output(0).splitlines() if mark in x]
    # A round may begin with the first tensor alone, before the others are submitted.
    # Then the tensors have different ages, and are in more than one warning.
    assert 1 <= len(warnings) < 20, job.logs()
    assert "'n0'" in warnings[0]
    assert all(1 <= line.count("has not submitted") <= 5 for line in warnings)
    assert any(re.search(r"; and \d+ more operations", line) for line in warnings)


def test_a_rank_that_left_after_a_kill_is_not_blamed(start_job: StartJob) -> None:
    script = dedent(
        """
        submit("all").wait()
        if rank == 2:
            os.kill(os.getpid(), 9)
        try:
            submit("next").wait()
        except _native.StatusError as error:
            print("caught:", error, flush=True)
        """
    )
    job = start_job(3, HEAD + script)
    assert job.wait(30) != 0
    for rank in range(2):
        assert "(f64[4], SUM): rank 2 " in job.output(rank), job.logs()


def test_a_waiting_rank_can_be_interrupted(start_job: StartJob) -> None:
    job = start_job(2, WAITING)
    for rank in range(2):
        job.wait_for(rank, "ready")
    time.sleep(0.3)  # the ranks wait by now, or soon; both cases must end
    job.interrupt()
    job.wait()
    assert "caught: KeyboardInterrupt" in job.output(0), job.logs()


def test_memory_of_an_interrupted_operation_cannot_be_resized(
    start_job: StartJob,
) -> None:
    script = dedent(
        """
        import os
        import signal

        import numpy as np

        import ringjax

        class Stop(Exception):
            pass

        def stop(*_):
            raise Stop

        ringjax.init()
        rank = ringjax.rank()
        x, out = np.full(8, 1 + rank, np.uint8), bytearray(8)

        def add():
            ringjax.eager.allreduce(x, ringjax.Sum, name="late", out=out)

        if rank == 0:
            signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            try:
                add()
            except Stop:
                print("interrupted", flush=True)
            try:
                out.append(0)
            except BufferError:
                print("refused", flush=True)
        ringjax.barrier()
        if rank == 1:
            add()
        ringjax.eager.allreduce(x, name="next")
        assert out == bytes([3]) * 8, out
        while len(out) == 8:  # until the thread of the lane has released the buffer
            try:
                out.append(0)
            except BufferError:
                os.sched_yield()
        """
    )
    job = start_job(2, script)
    assert job.wait(30) == 0, job.logs()
    assert "interrupted\nrefused" in job.output(0), job.logs()
