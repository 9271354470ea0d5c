"""How ranks abort NCCL together when an epoch fails, on stubs and not on a GPU.

An abort frees memory that other ranks of the host and other communicators of the
process may still use. So all of them stop first, within a time limit.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support import killable_rank
from support.launch import StartJob
from support.stub_processes import stub_job
from support.stubs import read_log

HEAD = """
import os, sys, time
import numpy as np
from support import device_calls as calls, killable_rank
import ringjax

calls.open_at_init()
rank, size = (int(os.environ["RINGJAX_" + x]) for x in ("RANK", "SIZE"))
if rank == 1 and "MORTAL" in os.environ:
    killable_rank.run_in_child()
ringjax.init()
small = [np.ones(3, np.float32)]
"""
SLOW = 0.6  # one rank stops this many seconds later
start = partial(stub_job, HEAD)


# The failing rank 0 must wait for a slow rank 1, and rank 1 for a slow rank 0.
@pytest.mark.parametrize("slow", [0, 1])
def test_all_ranks_stop_before_one_aborts(
    start_job: StartJob, tmp_path: Path, slow: int
) -> None:
    log = tmp_path / "nccl"
    job = start(
        start_job,
        2,
        """
        device = calls.Device()
        device.start(small, site=1)
        started = os.environ["NCCL_STUB_LOG"] + ".started"
        if rank == 1:
            open(started, "x").close()
        else:
            # The failure of rank 0 must not reach rank 1 within its first START.
            while not os.path.exists(started):
                time.sleep(0.01)  # rank 1 can only leave a file, so poll for it
            began = time.monotonic()
            try:
                device.start(small, site=1)  # fails: the last START was not collected
            except Exception as error:
                print("failed", began, error, flush=True)
        while not device.core.aborted:
            time.sleep(0.01)
        ringjax.shutdown()
        """,
        {"RINGJAX_FAILPOINTS": f"device.aborted=sleep({SLOW})@{slow}"},
        NCCL_STUB_LOG=str(log),
    )
    assert job.wait() == 0, job.logs()
    _, began, text = job.output(0).split(maxsplit=2)
    assert "never collected the results" in text
    aborts = [x for x in read_log(log) if x["function"] == "ncclCommAbort"]
    assert {x["rank"] for x in aborts} == {0, 1}
    assert all(x["seconds"] - float(began) >= SLOW for x in aborts), (began, aborts)


def test_the_wait_for_a_rank_that_does_not_stop_is_limited(
    start_job: StartJob,
) -> None:
    job = start(
        start_job,
        2,
        """
        device = calls.Device()
        if rank == 0:
            device.core.abort("aborted by the test", 0)  # rank 1 is not informed
            ringjax.shutdown()
            print("shut down", flush=True)
        else:
            time.sleep(1000)
        """,
    )
    job.wait_for(0, "shut down")
    job.kill(rank=1)
    job.wait()


def test_all_communicators_stop_before_one_aborts(
    start_job: StartJob, tmp_path: Path
) -> None:
    log = tmp_path / "both"
    job = start(
        start_job,
        4,
        """
        sets = [[0, 1], [0, 1, 2], [0, 1, 3]]
        numbers = [0, *(ringjax.add_process_set(x).process_set_id for x in sets)]
        if rank > 0:
            print("ready", flush=True)
            time.sleep(1000)
        devices = [calls.Device(number) for number in numbers]
        for device in devices:
            device.enqueue("allreduce", small)
        print("ready", os.getpid(), flush=True)
        for device in devices:
            try:
                device.core.synchronize()
            except Exception as error:
                assert "rank 1" in str(error), error
        ringjax.shutdown()
        print("shut down", flush=True)
        """,
        # The first communicator of rank 0 is late in marking its results as void.
        {"RINGJAX_FAILPOINTS": f"device.aborted=sleep({SLOW})@0#1", "MORTAL": "1"},
        NCCL_STUB_LOG=str(log),
        CUDA_STUB_LOG=str(log),
    )
    for rank in range(4):
        job.wait_for(rank, "ready")
    killable_rank.kill(job, rank=1)
    job.wait_for(0, "shut down")
    job.interrupt()
    job.wait()
    own = [x for x in read_log(log) if str(x["pid"]) == job.output(0).split()[1]]
    voided = [i for i, x in enumerate(own) if x.get("memset") == 1]
    aborted = [i for i, x in enumerate(own) if x.get("function") == "ncclCommAbort"]
    assert len(voided) == len(aborted) == 4, own
    assert max(voided) < min(aborted), own
