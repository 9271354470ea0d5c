"""Jobs in which most ranks have no heartbeat from each other: all name the culprit.

With ten ranks on one host, each rank watches six others (links/standing.py).
"""

from __future__ import annotations

import pytest
from support.launch import StartJob

SIZE, CULPRIT = 10, 6

SCRIPT = """
import os, signal, sys
import numpy as np
import ringjax
from support.numpy_only import allreduce

ringjax.init()
# ringrun ends all ranks a second after a loss, also one that is about to report it.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = ringjax.rank()
culprit, way = int(os.environ["CULPRIT"]), os.environ["WAY"]
try:
    for step in range(10**9):
        allreduce(np.full(1000, rank + 1.0, "f4"), "Average", name="grads")
        if step == 100 and rank == culprit:
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "leave":
                ringjax.shutdown()
                sys.exit(0)
            raise ValueError("the data set is gone")
except Exception as error:
    print(f"caught: {error}", flush=True)
    raise
"""

ALLTOALL = """
import signal
import numpy as np
import ringjax
from ringjax import eager

ringjax.init()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    eager.alltoall(np.zeros(10 * 2000, "f4"), name="rows")
except Exception as error:
    print(f"caught: {error}", flush=True)
    raise
"""

REASONS = {
    "kill": "closed its connection (the process ended)",
    "leave": "has shut down before this call",
    "raise": "failed: ValueError: the data set is gone",
}


@pytest.mark.parametrize("shm", ["1", "0"])
@pytest.mark.parametrize("way", ["kill", "leave", "raise"])
def test_all_ranks_name_the_rank_that_is_gone(
    start_job: StartJob, way: str, shm: str
) -> None:
    # Long limits, so that nothing but the culprit's end can be the reason.
    env = {
        "RINGJAX_SHM": shm,
        "RINGJAX_FAILURE_TIMEOUT": "600",
        "RINGJAX_COLLECTIVE_TIMEOUT": "600",
    }
    env |= {"CULPRIT": str(CULPRIT), "WAY": way}
    job = start_job(SIZE, SCRIPT, env=env)
    assert job.wait(50) != 0, job.logs()
    for rank in {*range(SIZE)} - {CULPRIT}:
        text = job.output(rank).partition("caught: ")[2]
        assert f"rank {CULPRIT} {REASONS[way]}" in text, job.logs()


def test_a_rank_that_is_lost_before_it_connects_on_demand_is_named(
    start_job: StartJob,
) -> None:
    """An alltoall needs links to all ranks, most of which do not exist before it."""
    env = {
        "RINGJAX_SHM": "0",
        "RINGJAX_CALIBRATE": "off",
        "RINGJAX_START_TIMEOUT": "600",
        "RINGJAX_COLLECTIVE_TIMEOUT": "600",
        "RINGJAX_FAILPOINTS": f"call.agreed=kill@{CULPRIT}",
    }
    job = start_job(SIZE, ALLTOALL, env=env)
    assert job.wait(50) != 0, job.logs()
    for rank in {*range(SIZE)} - {CULPRIT}:
        text = job.output(rank).partition("caught: ")[2]
        assert f"rank {CULPRIT} {REASONS['kill']}" in text, job.logs()
