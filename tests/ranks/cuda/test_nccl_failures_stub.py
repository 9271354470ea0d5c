"""Ranks, NCCL and CUDA that fail, in jobs on the stubs: no GPU tests.

What must come of it: an error on every rank, soon, that names who and what; no crash,
no hang, nothing left behind; and a world that can be formed again.
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

def tell(error):
    sys.stdout.write(f"caught: {error}\\n")
    sys.stdout.flush()

def begin():
    ringjax.init()
    return calls.Device()

def steps(device, count, values=None):
    # small ones that are packed, and a large one in place
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


def job(
    start: StartJob,
    np: int,
    script: str,
    env: dict[str, str] | None = None,
    **stubs: str | float,
) -> Job:
    """The test hangs if only silence, or a limit, would tell ranks of a loss."""
    limits = {"RINGJAX_FAILURE_TIMEOUT": "60"}
    return stub_job(HEAD, start, np, script, limits | (env or {}), **stubs)


def caught(one: Job, rank: int) -> str:
    """The text of the error that a rank caught."""
    assert "caught: " in one.output(rank), one.logs()
    return one.output(rank).partition("caught: ")[2]


def test_a_killed_rank_is_named_and_the_survivor_goes_on(start_job: StartJob) -> None:
    one = job(
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
            tell(error)
        enqueued = device.stats("allreduce")["calls"]
        for again in (device.core.synchronize, device.core.check,
                      lambda: device.run("allreduce", arrays), device.done):
            try:
                again()
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
        one.wait_for(rank, "training")
    killable_rank.kill(one, rank=1)
    one.wait_for(0, "works 1")
    one.kill(rank=1)
    assert one.wait() == 128 + signal.SIGKILL, one.logs()
    assert "rank 1" in caught(one, 0)
    assert "late: RINGJAX[world" in one.output(0), one.logs()


@needs_kernels
def test_a_killed_rank_voids_what_was_enqueued_with_it(start_job: StartJob) -> None:
    one = job(
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
            tell(error)
        for array in [*arrays, gathered]:
            assert np.isnan(array[0]), array[:3]
        print("all void", flush=True)
        ringjax.shutdown()
        """,
    )
    for rank in range(3):
        one.wait_for(rank, "ready")
    time.sleep(0.2)  # until most wait for the device
    killable_rank.kill(one, rank=1)
    for rank in (0, 2):
        one.wait_for(rank, "all void")
        assert "rank 1" in caught(one, rank)
    one.kill(rank=1)
    assert one.wait() == 128 + signal.SIGKILL, one.logs()


def test_nothing_goes_before_a_group_that_nccl_has_yet_to_launch(
    start_job: StartJob,
) -> None:
    """Least of all the memory of the group: the stub ends a process that does so."""
    one = job(
        start_job,
        1,
        """
        import tempfile, threading
        with tempfile.TemporaryDirectory() as folder:
            log = calls.NcclLog.begin(folder)
            device = begin()

            def condemn():
                while not any(x["function"] == "ncclAllReduce" for x in log.take()):
                    time.sleep(0.01)
                device.core.abort("somebody said so", 0)

            thread = threading.Thread(target=condemn)
            thread.start()
            try:
                device.enqueue("allreduce", [np.ones(3, np.float32)] * 2)
            except Exception as error:
                tell(error)
            thread.join()
            ringjax.shutdown()
        """,
        {"RINGJAX_FUSION": "pack"},
        NCCL_STUB_LATENCY_MS=20_000,
    )
    assert one.wait() == 0, one.logs()
    assert "somebody said so" in caught(one, 0), one.logs()


def test_worlds_one_after_the_other(start_job: StartJob) -> None:
    one = job(
        start_job,
        2,
        """
        def held():
            time.sleep(0.05)
            return [len(os.listdir("/proc/self/" + x)) for x in ("fd", "task")]

        most = None
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
            # threads of the stub end a moment after their streams
            most = most or [min(x) for x in zip(*(held() for _ in range(10)))]
            while any(now > x for now, x in zip(held(), most)):
                pass
        """,
    )
    assert one.wait(40) == 0, one.logs()
    for rank in range(2):
        assert one.output(rank).count("works 2") == 5


def test_a_rank_that_never_calls_is_named(start_job: StartJob) -> None:
    one = job(
        start_job,
        3,
        """
        device = begin()
        steps(device, 2)
        if rank == 2:
            while not device.core.aborted:  # it hears of it as well
                time.sleep(0.05)
            ringjax.shutdown()
            sys.exit()
        try:
            steps(device, 1)
        except Exception as error:
            tell(repr(ringjax.errors.from_status(error)))
        ringjax.shutdown()
        """,
        {"RINGJAX_COLLECTIVE_TIMEOUT": "2", "RINGJAX_STALL_WARNING": "1"},
    )
    assert one.wait() == 0, one.logs()
    for rank in (0, 1):
        text = caught(one, rank)
        assert "rank 2" in text, one.logs()
        assert "grads" in text
        assert "for 2 s" in text
        assert "still waiting" in one.output(rank), one.logs()


def test_work_that_does_not_end_is_named(start_job: StartJob) -> None:
    one = job(
        start_job,
        2,
        """
        device = begin()
        try:
            steps(device, 1)
        except Exception as error:
            tell(error)
        ringjax.shutdown()
        """,
        {"RINGJAX_COLLECTIVE_TIMEOUT": "2"},
        NCCL_STUB_STALL_SECONDS=60,
    )
    assert one.wait() == 0, one.logs()
    for rank in range(2):
        text = caught(one, rank)
        assert "allreduce 'grads'" in text
        assert "does not end though every rank has called it" in text


def test_an_error_that_nccl_finds_names_the_rank(start_job: StartJob) -> None:
    """Only the peer's NCCL connection is lost, so its heartbeat reports nothing."""
    one = job(
        start_job,
        2,
        """
        device = begin()
        steps(device, 2)
        if rank == 1:
            device.core.abort("somebody said so", 1)
        else:
            try:
                steps(device, 1)
            except Exception as error:
                tell(error)
        runtime.current("test").exchange("", "told")
        ringjax.shutdown()
        """,
        NCCL_STUB_DETECT_DEATH=1,
    )
    assert one.wait() == 0, one.logs()
    text = caught(one, 0)
    assert "RINGJAX[world" in text, one.logs()
    assert "an error of NCCL: a peer went away (rank 1" in text, one.logs()


# Each fails once on rank 1, or at its nth call: some are called again on the way out of
# an error, and what they say then does not matter.
STRUCK = {
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
@pytest.mark.parametrize("where", STRUCK)
def test_functions_that_fail(start_job: StartJob, where: str) -> None:
    """Both ranks hear of each, and the world can be formed again."""
    names = STRUCK[where].split()
    one = job(
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
                print("all is well", flush=True)
            except Exception as error:
                print("error", attempt, type(error).__name__, error, flush=True)
            ringjax.shutdown()
        """,
    )
    assert one.wait(40) == 0, one.logs()
    for rank in range(2):
        lines = one.output(rank).splitlines()
        for name in names:
            told = [line for line in lines if name.partition(":")[0] in line]
            assert any("rank 1" in line for line in told), (name, one.logs())
        assert "all is well" in lines, one.logs()


def test_the_init_of_nccl_ends_in_time(start_job: StartJob) -> None:
    one = job(
        start_job,
        2,
        """
        try:
            begin()
        except ringjax.errors.StartupError as error:
            tell(error)
        ringjax.shutdown()
        """,
        {"RINGJAX_START_TIMEOUT": "4"},  # for two interpreters to start, too
        NCCL_STUB_INIT_HANG=1,
    )
    assert one.wait() == 0, one.logs()
    texts = [caught(one, rank) for rank in range(2)]
    assert any("has not connected 2 ranks within 4 s" in text for text in texts)


def test_versions_of_nccl_must_be_alike(start_job: StartJob) -> None:
    one = job(
        start_job,
        3,
        """
        os.environ["NCCL_STUB_VERSION"] = "22703" if rank == 1 else "22809"
        try:
            begin()
        except ringjax.errors.StartupError as error:
            tell(error)
        """,
    )
    assert one.wait() == 0, one.logs()
    for rank in range(3):
        text = caught(one, rank)
        for word in ["2.28.9", "2.27.3", "libnccl.so.2", "rank 1", "RINGJAX_NCCL"]:
            assert word in text, text


def test_a_rank_without_a_device(start_job: StartJob) -> None:
    one = job(
        start_job,
        2,
        """
        if rank == 1:
            os.environ["CUDA_STUB_DEVICES"] = "0"
        try:
            ringjax.init()
        except Exception as error:
            tell(error)
        else:
            tell(runtime.current("test").devices.problem(0))
            one = np.ones(2, np.float32)
            runtime.current("test").communicators[0].execute(0, 1, [one], [one])
            assert (one == 2).all()
        ringjax.shutdown()
        """,
    )
    assert one.wait() == 0, one.logs()
    texts = [caught(one, rank).strip() for rank in range(2)]
    assert texts[0] == texts[1]
    assert "rank 1" in texts[0]


def test_ctrl_c_while_waiting_for_the_device(start_job: StartJob) -> None:
    one = job(
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
        one.wait_for(rank, "ready")
    time.sleep(0.3)  # until it waits
    one.kill(rank=1, sig=signal.SIGINT)
    one.wait_for(1, "KeyboardInterrupt")  # and not the limit of a call, 60 s
    assert one.wait() != 0
