"""Alltoall between hosts: Bruck's algorithm if all parts are equal, otherwise pairwise.

The ranks of one machine name different hosts, so their links are TCP.
"""

from __future__ import annotations

import pytest
from support.launch import StartJob

SCRIPT = """
import os

host = int(os.environ["RINGJAX_RANK"]) // int(os.environ["PER_HOST"])
os.environ["RINGJAX_HOSTNAME"] = f"host{host}"

import numpy as np
import ringjax
import support.numpy_only
from ringjax import _native, eager, runtime

ringjax.init()
rank, size = ringjax.rank(), ringjax.size()


def parts(sender, rows, more, dtype):
    # The array that each rank receives: rank 0 receives `more` rows more.
    of = [np.full((rows + more * (r == 0), 3), 1 + 7 * sender + r) for r in range(size)]
    return [part.astype(dtype) for part in of]


def compiled(x, rows, out):
    which = _native.COLLECTIVES["alltoall"], 0
    runtime.communicator(runtime.global_process_set).execute(*which, [x], [out],
                                                             counts=rows, name="c")


for dtype in ("bool", "uint8", "float16", "int64", "complex128"):
    for rows, more in ((0, 0), (1, 0), (3, 0), (501, 0), (2, 1)):
        mine = parts(rank, rows, more, dtype)
        splits = [len(part) for part in mine]
        theirs = [parts(sender, rows, more, dtype)[rank] for sender in range(size)]
        x, want = np.concatenate(mine), np.concatenate(theirs)
        got, received = eager.alltoall(x, splits=splits, name="e")
        out = np.empty_like(want)
        compiled(x, splits + [len(part) for part in theirs], out)
        for result in (got, out):
            assert result.dtype == x.dtype and np.array_equal(result, want)
        last = {c["name"]: c["algorithm"] for c in ringjax.recent_calls()}
        if rows:
            forced = os.environ["RINGJAX_ALGORITHM"].partition(":")[2]
            expected = "pairwise" if more else forced
            assert last == {"e": expected, "c": expected}, (last, rows, more)
ringjax.shutdown()
"""


@pytest.mark.parametrize(
    ("algorithm", "size", "per_host"),
    [
        *(("bruck", *hosts) for hosts in ((2, 1), (3, 2), (5, 2), (7, 3))),
        *(("hierarchical", *hosts) for hosts in ((4, 2), (6, 3))),
    ],
)
def test_only_even_alltoalls_use_the_algorithm(
    start_job: StartJob, algorithm: str, size: int, per_host: int
) -> None:
    env = {"PER_HOST": str(per_host), "RINGJAX_ALGORITHM": f"alltoall:{algorithm}"}
    job = start_job(size, SCRIPT, env=env | {"RINGJAX_CALIBRATE": "off"})
    assert job.wait(55) == 0, job.logs()


def test_a_rank_without_descriptors_is_named_by_all(start_job: StartJob) -> None:
    script = """
import os, resource
os.environ["RINGJAX_HOSTNAME"] = "host" + os.environ["RINGJAX_RANK"]
import numpy as np
import ringjax
from ringjax import eager
ringjax.init()
eager.barrier()
if ringjax.rank() == 3:  # which has no link to rank 0 yet
    open_now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now, open_now))
try:
    eager.alltoall(np.ones(ringjax.size(), "f4"))
except ringjax.errors.PeerLost as error:
    print("raised:", error.rank, str(error), flush=True)
"""
    env = {"RINGJAX_ALGORITHM": "alltoall:pairwise", "RINGJAX_CALIBRATE": "off"}
    job = start_job(6, script, env=env)
    job.wait(55)
    for rank in range(6):
        text = job.output(rank)
        assert "raised: 3 " in text and "rank 3 lacks descriptors" in text, job.logs()
