"""Failing ranks, NCCL and CUDA in compiled programs, on stubs and not on a GPU.

Every rank must soon raise an error that names the rank and the cause. No rank may
crash, hang or leak, and `init` must work again afterwards.
"""

from __future__ import annotations

import signal
import time

import pytest
from support import killable_rank
from support.device_code import needs_kernels
from support.launch import Job, StartJob
from support.stub_processes import stub_job

HEAD = """
import os, signal, sys, time
import numpy as np
from support import device_calls as calls, killable_rank
import ringjax
from ringjax import runtime

calls.open_at_init()
rank, size = (int(os.environ["RINGJAX_" + x]) for x in ("RANK", "SIZE"))
FOREVER = 10**9

def report(error):
    sys.stdout.write(f"caught: {error}\\n")
    sys.stdout.flush()

def begin():
    ringjax.init()
    return calls.Device()

def steps(device, count, values=None):
    # two small arrays that are packed, and a large one in place
    arrays = values or [np.ones(3, np.float32), np.ones(4, np.float32),
                        np.ones(1 << 19, np.float32)]
    for _ in range(count):
        device.enqueue("allreduce", arrays, reduce="Average", name="grads")
        device.core.synchronize()
    return arrays

def must_work(device):
    assert all((array == 1).all() for array in steps(device, 3))
    print("works", device.size, flush=True)

"""


def start(
    start_job: StartJob,
    np: int,
    script: str,
    env: dict[str, str] | None = None,
    **stubs: str | float,
) -> Job:
    """Starts a job with a failure timeout that is too long to end a test."""
    limits = {"RINGJAX_FAILURE_TIMEOUT": "60"}
    return stub_job(HEAD, start_job, np, script, limits | (env or {}), **stubs)


def caught(job: Job, rank: int) -> str:
    """Returns the text of the error that a rank caught."""
    assert "caught: " in job.output(rank), job.logs()
    return job.output(rank).partition("caught: ")[2]


def test_a_killed_rank_is_named_and_the_survivor_continues(start_job: StartJob) -> None:
    job = start(
        start_job,
        2,
        """
        if rank == 1:
            killable_rank.run_in_child()
        device = begin()
        steps(device, 5)
        print("training", flush=True)
        arrays = [np.ones(3, np.float32), np.ones(4, np.float32)]
        try:
            steps(device, FOREVER, arrays)
        except Exception as error:
            report(error)
        enqueued = device.stats("allreduce")["calls"]
        for call in (device.core.synchronize, device.core.check,
                     lambda: device.run("allreduce", arrays), device.done):
            try:
                call()
            except Exception as error:
                assert "rank 1" in str(error), error
            else:
                raise AssertionError("no error")
        assert device.stats("allreduce")["calls"] == enqueued
        assert all(np.isnan(x[0]) or (x == 1).all() for x in arrays), arrays
        ringjax.shutdown()
        try:
            device.run("allreduce", arrays)
        except Exception as error:
            print("late:", error)
        os.environ.update(RINGJAX_RANK="0", RINGJAX_SIZE="1")
        must_work(begin())
        ringjax.shutdown()
        """,
    )
    for rank in range(2):
        job.wait_for(rank, "training")
    killable_rank.kill(job, rank=1)
    job.wait_for(0, "works 1")
    job.kill(rank=1)
    assert job.wait() == 128 + signal.SIGKILL, job.logs()
    assert "rank 1" in caught(job, 0)
    assert "late: RINGJAX[world" in job.output(0), job.logs()


@needs_kernels
def test_a_killed_rank_poisons_enqueued_operations(start_job: StartJob) -> None:
    job = start(
        start_job,
        3,
        """
        if rank == 1:
            killable_rank.run_in_child()
        device = begin()
        steps(device, 2)
        arrays = [np.ones(3, np.float32), np.ones(4, np.float16),
                  np.ones(1 << 19, np.float32)]
        gathered = np.ones(6, np.float64)
        if rank == 1:
            print("ready", flush=True)
            signal.pause()
        device.enqueue("allreduce", arrays, name="grads")
        device.enqueue("allgather", [gathered[:2].copy()], [gathered], counts=[2, 2, 2])
        device.start([np.ones(2, np.float32)], site=1)
        print("ready", flush=True)
        try:
            device.core.synchronize()
        except Exception as error:
            report(error)
        for array in [*arrays, gathered]:
            assert np.isnan(array[0]), array[:3]
        print("all void", flush=True)
        ringjax.shutdown()
        """,
    )
    for rank in range(3):
        job.wait_for(rank, "ready")
    time.sleep(0.2)  # most ranks wait for the device now
    killable_rank.kill(job, rank=1)
    for rank in (0, 2):
        job.wait_for(rank, "all void")
        assert "rank 1" in caught(job, rank)
    job.kill(rank=1)
    assert job.wait() == 128 + signal.SIGKILL, job.logs()


def test_operations_wait_for_a_group_that_nccl_has_not_launched(
    start_job: StartJob,
) -> None:
    """Also freeing the memory of the group must wait; else the stub exits."""
    job = start(
        start_job,
        1,
        """
        import tempfile, threading
        with tempfile.TemporaryDirectory() as folder:
            log = calls.NcclLog.begin(folder)
            device = begin()

            def abort():
                while not any(x["function"] == "ncclAllReduce" for x in log.take()):
                    time.sleep(0.01)
                device.core.abort("aborted by the test", 0)

            thread = threading.Thread(target=abort)
            thread.start()
            try:
                device.enqueue("allreduce", [np.ones(3, np.float32)] * 2)
            except Exception as error:
                report(error)
            thread.join()
            ringjax.shutdown()
        """,
        {"RINGJAX_FUSION": "pack"},
        NCCL_STUB_LATENCY_MS=20_000,
    )
    assert job.wait() == 0, job.logs()
    assert "aborted by the test" in caught(job, 0), job.logs()


def test_several_worlds_in_one_process(start_job: StartJob) -> None:
    job = start(
        start_job,
        2,
        """
        def resources():
            time.sleep(0.05)
            return [len(os.listdir("/proc/self/" + x)) for x in ("fd", "task")]

        least = None
        for _ in range(5):
            device = begin()
            must_work(device)
            device.start([np.ones(5, np.float32)], site=1)
            device.done(site=1)
            ringjax.shutdown()
            try:
                device.run("barrier")
            except Exception as error:
                assert "ringjax is shut down" in str(error), error
            else:
                raise AssertionError("no error")
            del device
            # Threads of the stub end a moment after their streams.
            least = least or [min(x) for x in zip(*(resources() for _ in range(10)))]
            while any(now > x for now, x in zip(resources(), least)):
                pass
        """,
    )
    assert job.wait(40) == 0, job.logs()
    for rank in range(2):
        assert job.output(rank).count("works 2") == 5


def test_a_rank_that_never_calls_is_named(start_job: StartJob) -> None:
    job = start(
        start_job,
        3,
        """
        device = begin()
        steps(device, 2)
        if rank == 2:
            while not device.core.aborted:  # rank 2 is informed of the abort, too
                time.sleep(0.05)
            ringjax.shutdown()
            sys.exit()
        try:
            steps(device, 1)
        except Exception as error:
            report(repr(ringjax.errors.from_status(error)))
        ringjax.shutdown()
        """,
        {"RINGJAX_COLLECTIVE_TIMEOUT": "2", "RINGJAX_STALL_WARNING": "1"},
    )
    assert job.wait() == 0, job.logs()
    for rank in (0, 1):
        text = caught(job, rank)
        assert "rank 2" in text, job.logs()
        assert "grads" in text
        assert "for 2 s" in text
        assert "still waiting" in job.output(rank), job.logs()


def test_work_that_does_not_end_is_named(start_job: StartJob) -> None:
    job = start(
        start_job,
        2,
        """
        device = begin()
        try:
            steps(device, 1)
        except Exception as error:
            report(error)
        ringjax.shutdown()
        """,
        {"RINGJAX_COLLECTIVE_TIMEOUT": "2"},
        NCCL_STUB_STALL_SECONDS=60,
    )
    assert job.wait() == 0, job.logs()
    for rank in range(2):
        text = caught(job, rank)
        assert "allreduce 'grads'" in text
        assert "does not end though every rank has called it" in text


def test_an_error_that_nccl_finds_names_the_rank(start_job: StartJob) -> None:
    """Rank 1 loses only its NCCL connection, so its heartbeat reports no loss."""
    job = start(
        start_job,
        2,
        """
        device = begin()
        steps(device, 2)
        if rank == 1:
            device.core.abort("aborted by the test", 1)
        else:
            try:
                steps(device, 1)
            except Exception as error:
                report(error)
        runtime.current("test").exchange("", "reported")
        ringjax.shutdown()
        """,
        NCCL_STUB_DETECT_DEATH=1,
    )
    assert job.wait() == 0, job.logs()
    text = caught(job, 0)
    assert "RINGJAX[world" in text, job.logs()
    assert "an error of NCCL: a peer went away (rank 1" in text, job.logs()


# Each function fails once on rank 1, at its first call or at call n of "name:n". Later
# calls succeed, because cleaning up after an error calls some functions again.
FAILING_FUNCTIONS = {
    "at the beginning": (
        "cuDevicePrimaryCtxRetain cuModuleLoadData cuStreamCreateWithPriority "
        "cuMemAllocAsync ncclCommInitRankConfig"
    ),
    "in a call": (
        "cuMemAllocAsync:2 cuLaunchKernel ncclGroupStart ncclAllReduce ncclGroupEnd:2"
    ),
    "between streams": "cuEventRecord cuStreamWaitEvent:2",
}


@needs_kernels
@pytest.mark.parametrize("where", FAILING_FUNCTIONS)
def test_every_failing_function_of_cuda_or_nccl_is_named(
    start_job: StartJob, where: str
) -> None:
    """Both ranks raise an error for each function, and `init` works again."""
    names = FAILING_FUNCTIONS[where].split()
    job = start(
        start_job,
        2,
        f"""
        for prefix, variable in dict(cu="CUDA", nccl="NCCL").items():
            if rank == 1:
                names = [name for name in {names} if name.startswith(prefix)]
                os.environ[variable + "_STUB_FAIL"] = ",".join(names)
        for attempt in range({len(names) + 1}):
            device = None
            try:
                device = begin()
                must_work(device)
                arrays = [np.ones(3, np.float32), np.ones(2, np.float32)]
                device.start(arrays, reduce="Average", name="bucket")
                device.done()
                device.core.synchronize()
                print("no error", flush=True)
            except Exception as error:
                print("error", attempt, type(error).__name__, error, flush=True)
            ringjax.shutdown()
        """,
    )
    assert job.wait(40) == 0, job.logs()
    for rank in range(2):
        lines = job.output(rank).splitlines()
        for name in names:
            errors = [line for line in lines if name.partition(":")[0] in line]
            assert any("rank 1" in line for line in errors), (name, job.logs())
        assert "no error" in lines, job.logs()


def test_the_initialization_of_nccl_has_a_timeout(start_job: StartJob) -> None:
    job = start(
        start_job,
        2,
        """
        try:
            begin()
        except ringjax.errors.StartupError as error:
            report(error)
        ringjax.shutdown()
        """,
        {"RINGJAX_START_TIMEOUT": "4"},  # also long enough to start two interpreters
        NCCL_STUB_INIT_HANG=1,
    )
    assert job.wait() == 0, job.logs()
    texts = [caught(job, rank) for rank in range(2)]
    assert any("has not connected 2 ranks within 4 s" in text for text in texts)


def test_different_nccl_versions_are_refused(start_job: StartJob) -> None:
    job = start(
        start_job,
        3,
        """
        os.environ["NCCL_STUB_VERSION"] = "22703" if rank == 1 else "22809"
        try:
            begin()
        except ringjax.errors.StartupError as error:
            report(error)
        """,
    )
    assert job.wait() == 0, job.logs()
    for rank in range(3):
        text = caught(job, rank)
        for word in ["2.28.9", "2.27.3", "libnccl.so.2", "rank 1", "RINGJAX_NCCL"]:
            assert word in text, text


def test_a_rank_without_a_device(start_job: StartJob) -> None:
    job = start(
        start_job,
        2,
        """
        if rank == 1:
            os.environ["CUDA_STUB_DEVICES"] = "0"
        try:
            ringjax.init()
        except Exception as error:
            report(error)
        else:
            report(runtime.current("test").devices.problem(0))
            x = np.ones(2, np.float32)
            runtime.current("test").communicators[0].execute(0, 1, [x], [x])
            assert (x == 2).all()
        ringjax.shutdown()
        """,
    )
    assert job.wait() == 0, job.logs()
    texts = [caught(job, rank).strip() for rank in range(2)]
    assert texts[0] == texts[1]
    assert "rank 1" in texts[0]


def test_ctrl_c_while_waiting_for_the_device(start_job: StartJob) -> None:
    job = start(
        start_job,
        2,
        """
        device = begin()
        steps(device, 1)
        print("ready", flush=True)
        if rank == 0:
            time.sleep(1000)
        steps(device, 1)
        """,
    )
    for rank in range(2):
        job.wait_for(rank, "ready")
    time.sleep(0.3)  # rank 1 waits now
    job.kill(rank=1, sig=signal.SIGINT)
    job.wait_for(1, "KeyboardInterrupt")  # before the timeout of the call, 60 s
    assert job.wait() != 0
