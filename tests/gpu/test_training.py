"""Training by ranks that share a GPU: equal bits on all ranks and in another run.

programs/training.py also compares each training with the same training by one rank.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
from support import gpu_ranks
from support.launch import Job

from benchmarks.harness import machine

PROGRAM = str(gpu_ranks.PROGRAMS / "training.py")
WAYS = ("in place", "overlapped", "compressed")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    """Runs a job of the program; returns what each rank has printed."""

    def start(np: int, *words: str, **env: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-P", PROGRAM, *words]
        folder = tmp_path_factory.mktemp("job")
        job = Job(np, command, folder, gpu_ranks.environment() | env).start()
        try:
            assert job.wait(100) == 0, job.logs()
            lines = [job.output(rank).splitlines() for rank in range(np)]
            return [
                json.loads(next(x for x in line if x.startswith("{"))) for line in lines
            ]
        finally:
            job.close()

    return start


@pytest.fixture(scope="module")
def trained(run) -> list[dict[str, Any]]:
    """The results of two ranks that have trained in every way."""
    return run(2, "50", *WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_hold_the_same_bits(trained, way) -> None:
    first, second = (rank[way] for rank in trained)
    assert first == second


def test_another_run_gives_the_same_bits(run, trained) -> None:
    again = run(2, "50", *WAYS)
    for way in WAYS:
        assert again[0][way] == trained[0][way], way


def test_four_ranks_hold_the_same_bits(run) -> None:
    ranks = run(4, "20", "overlapped")
    assert len({rank["overlapped"] for rank in ranks}) == 1


def test_nccl_carries_the_gradients_of_a_gpu(trained) -> None:
    assert {rank["nccl"] for rank in trained} == {not gpu_ranks.ON_CPU}


def test_the_sum_is_that_of_psum(run, trained, record_property) -> None:
    """The libraries may add in another order, but nothing else may differ."""
    port = machine.free_port()
    ours = np.array(trained[0]["sum"])
    theirs = np.array(run(2, "0", "psum", PSUM_PORT=str(port))[0]["sum"])
    assert len(ours) == len(theirs) > 1000
    equal = f"{(ours == theirs).sum()} of {len(ours)} elements"
    record_property("equal to the last bit", equal)
    assert (abs(ours - theirs) / np.maximum(abs(theirs), 1.0)).max() <= 1e-5
