"""Failing ranks, NCCL and CUDA under the eager lane, on stubs and not on a GPU.

Every rank must soon raise an error that names the rank and the cause. No rank may hang
or leak. Until NCCL has connected, the lane must still accept tensors of the host. Other
tests check what `init` imports if the program uses PyTorch.
"""

from __future__ import annotations

import signal
from functools import partial

import pytest
from support import killable_rank
from support.device_code import needs_kernels
from support.launch import Job, StartJob
from support.stub_processes import stub_job

HEAD = """
import os, sys, time
import numpy as np
from support.device_calls import DefaultStream
from support import killable_rank
from support.lane_calls import LaneClient, live_resources, without_jax
import ringjax
from ringjax import _native

rank, size = (int(os.environ["RINGJAX_" + x]) for x in ("RANK", "SIZE"))

def begin():
    without_jax()
    ringjax.init()
    return LaneClient()

def ones(count=3):
    return np.ones(count, np.float32)

def report(error):
    sys.stdout.write(f"caught {error.code} {error.rank}: {error}\\n")
    sys.stdout.flush()

def fails(end, name="x", **options):
    try:
        end.run("allreduce", name, [ones()], **options)
    except _native.StatusError as error:
        report(error)
    else:
        raise AssertionError("no error")

def must_work_on_the_host(end):
    for i in range(3):
        out, = end.run("allreduce", f"host {i}", [ones()], cuda=False)
        assert (out == size).all()
    print("works on the host", flush=True)

def shut_down():
    ringjax.shutdown()
    print("down", flush=True)
"""


start = partial(stub_job, HEAD)


def caught(job: Job, rank: int) -> list[str]:
    """Returns the errors of a rank, in order."""
    lines = job.output(rank).splitlines()
    found = [x.partition("caught ")[2] for x in lines if "caught " in x]
    assert found, job.logs()
    return found


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("NCCL_STUB_VERSION=22600", "rank 1 cannot take CUDA tensors: NCCL 22600"),
        ("NCCL_STUB_VERSION=22810", "rank 1 cannot exchange CUDA tensors with rank 0"),
        ("CUDA_STUB_UUID=alike", "rank 1 computes on the same GPU as rank 0"),
        ("RINGJAX_FUSION=pack", "RINGJAX_FUSION or RINGJAX_FUSION_SMALL is not alike"),
        (
            "CUDA_STUB_FAIL=cuMemAllocAsync",
            "rank 1 cannot take CUDA tensors: cuMemAlloc",
        ),
    ],
)
def test_a_rank_without_cuda_fails_on_all_ranks(
    start_job: StartJob, setting: str, text: str
) -> None:
    job = start(
        start_job,
        2,
        f"""
        name, _, value = {setting!r}.partition("=")
        if rank == 1 or value == "alike":
            os.environ[name] = value
        end = begin()
        fails(end, "first")
        must_work_on_the_host(end)
        if "cuMemAllocAsync" in {setting!r}:  # fails only once
            assert (end.run("allreduce", "second", [ones()])[0] == size).all()
        else:
            fails(end, "second")
        must_work_on_the_host(end)
        shut_down()
        """,
    )
    assert job.wait() == 0, job.logs()
    for rank in range(2):
        assert all(text in error for error in caught(job, rank)), job.logs()
        assert "allreduce 'first'" in caught(job, rank)[0]


def test_nccl_that_does_not_connect(start_job: StartJob) -> None:
    job = start(
        start_job,
        2,
        """
        if rank == 1:
            os.environ["NCCL_STUB_FAIL"] = "ncclCommInitRankConfig"
        end = begin()
        fails(end, "first")
        must_work_on_the_host(end)
        fails(end, "second")
        must_work_on_the_host(end)
        shut_down()
        """,
        env={"RINGJAX_START_TIMEOUT": "4"},
    )
    assert job.wait() == 0, job.logs()
    for rank in range(2):
        assert "could not connect its CUDA device" in caught(job, rank)[0]


@needs_kernels
def test_a_killed_rank(start_job: StartJob) -> None:
    job = start(
        start_job,
        3,
        """
        if rank == 2:
            killable_rank.run_in_child()
        end = begin()
        (out,) = end.run("allreduce", "warm", [ones()])
        assert (out == 3).all()
        if rank == 2:
            stream = DefaultStream()
            stream.hold()  # the operation never starts on rank 2
        enqueued = end.submit("allreduce", "enqueued", [ones(), ones(5)])
        enqueued.ticket.wait()
        if rank == 2:
            print("ready", flush=True)
            time.sleep(1000)
        waiting = end.submit("allreduce", "waiting", [ones()])
        print("ready", flush=True)
        try:
            waiting.wait()
        except _native.StatusError as error:
            report(error)
        assert enqueued.ticket.done  # pollers must not wait for ever
        # Void results become NaN, so no program takes them for results.
        while not all(np.isnan(out[0]) for out in enqueued.outs):
            time.sleep(0.001)
        try:
            enqueued.ticket.wait()
        except _native.StatusError as error:
            report(error)
        fails(end, "later")
        ringjax.shutdown()
        print("down", flush=True)
        """,
    )
    for rank in range(3):
        job.wait_for(rank, "ready")
    killable_rank.kill(job, 2)
    for rank in range(2):
        job.wait_for(rank, "down")
        errors = caught(job, rank)
        assert len(errors) == 3, job.logs()
        assert all("UNAVAILABLE 2" in error for error in errors), errors
    job.kill(2)
    assert job.wait() == 128 + signal.SIGKILL, job.logs()


def test_an_operation_that_nccl_refuses(start_job: StartJob) -> None:
    job = start(
        start_job,
        2,
        """
        if rank == 1:
            os.environ["NCCL_STUB_FAIL"] = "ncclAllReduce:2"
        end = begin()
        assert (end.run("allreduce", "good", [ones()])[0] == 2).all()
        bad = end.submit("allreduce", "bad", [ones()])
        try:
            while True:
                bad.wait()
                end.run("allreduce", "next", [ones()])
        except _native.StatusError as error:
            report(error)
        fails(end, "later")
        shut_down()
        ringjax.init()
        assert (LaneClient().run("allreduce", "new epoch", [ones()])[0] == 2).all()
        """,
    )
    assert job.wait() == 0, job.logs()
    for rank in range(2):
        assert "rank 1" in caught(job, rank)[0], job.logs()


def test_shutdown_finishes_enqueued_operations(start_job: StartJob) -> None:
    job = start(
        start_job,
        2,
        """
        end = begin()
        end.run("allreduce", "warm", [ones()])
        pending = [end.submit("allreduce", f"x{i}", [ones(4096)]) for i in range(50)]
        gathered = end.submit("allgather", "rows", [ones()])
        for operation in (*pending, gathered):
            operation.ticket.wait()  # until the operation is enqueued
        shut_down()
        for operation in pending:
            (out,) = operation.wait()
            assert (out == 2).all()
        (out,) = gathered.wait()
        assert (out == 1).all()
        assert len(out) == 6
        del operation, pending, gathered, end, out
        import gc; gc.collect()
        assert live_resources() == (0, 0, 0), live_resources()
        """,
        CUDA_STUB_DELAY_US=2000,
    )
    assert job.wait() == 0, job.logs()


def test_a_forked_child_does_not_use_the_device(start_job: StartJob) -> None:
    job = start(
        start_job,
        2,
        """
        end = begin()
        pending = end.submit("allreduce", "x", [ones()])
        gathered = end.submit("allgather", "y", [ones()])
        gathered.wait()
        output = gathered.ticket.output(0)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                end.submit("allreduce", "z", [ones()])
            except _native.StatusError as error:
                code = 0 if "forked" in str(error) else 2
            del pending, gathered, output, end
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (pending.wait()[0] == 2).all()
        assert (end.run("allreduce", "z", [ones()])[0] == 2).all()
        shut_down()
        """,
    )
    assert job.wait() == 0, job.logs()


# -- what init loads -------------------------------------------------------------------


def test_jax_is_not_imported_if_only_pytorch_is_used(start_job: StartJob) -> None:
    job = start(
        start_job,
        2,
        """
        if rank == 0:
            begin()  # this rank uses PyTorch
            assert "jax" not in sys.modules
        else:
            ringjax.init()  # queries JAX, which has only the CPU in this test
            assert "ringjax.xla.jax_private" in sys.modules
        from ringjax import runtime
        print("problem:", runtime.current("x").devices.problem(0), flush=True)
        out = np.zeros(3, np.float32)
        LaneClient().submit("allreduce", "x", [ones()], [out]).wait()
        assert (out == 2).all()
        shut_down()
        """,
    )
    assert job.wait() == 0, job.logs()
    for rank in range(2):
        problem = job.output(rank).partition("problem: ")[2].splitlines()[0]
        assert problem == (
            "rank 0 has no CUDA device: JAX had not been imported before ringjax.init()"
        )


def test_an_initialized_jax_decides_the_device(start_job: StartJob) -> None:
    job = start(
        start_job,
        1,
        """
        import types
        import jax
        sys.modules["torch"] = types.ModuleType("torch")
        from ringjax import runtime
        runtime.init()  # JAX decides also without `ringjax.init`
        assert "ringjax.xla.jax_private" in sys.modules
        problem = runtime.current("x").devices.problem(0)
        assert problem == "rank 0 has no CUDA device: JAX_PLATFORMS is cpu", problem
        """,
    )
    assert job.wait() == 0, job.logs()


def test_cuda_tensors_need_a_device(start_job: StartJob) -> None:
    job = start(
        start_job,
        2,
        """
        end = begin()
        assert not end.lane.takes_cuda
        fails(end)
        must_work_on_the_host(end)
        """,
        env={"RINGJAX_GPU": "0"},
    )
    assert job.wait() == 0, job.logs()
    assert "CUDA tensors need a CUDA device" in caught(job, 0)[0]
