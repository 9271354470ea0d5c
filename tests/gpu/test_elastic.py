"""An elastic job on one GPU: a worker is killed, the job continues, a worker joins.

Two ranks share the device. programs/elastic.py checks the parameters.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import gpu_ranks, waiting
from support.launch import Job, StartJob

NEWCOMERS = range(2, 9)


def lines(job: Job, worker: int, event: str) -> list[dict[str, Any]]:
    """Returns the complete lines of a worker about one kind of event."""
    text = job.output(worker)
    found = text[: text.rfind("\n") + 1].splitlines()
    every = [json.loads(line) for line in found if line.startswith("{")]
    return [line for line in every if line["event"] == event]


@pytest.mark.timeout(150)
def test_a_job_loses_a_worker_and_gets_another(
    start_job: StartJob, tmp_path: Path, record_property
) -> None:
    stop_file = tmp_path / "stop"
    program = str(gpu_ranks.PROGRAMS / "elastic.py")
    job = start_job(
        2,
        [sys.executable, "-P", program, str(stop_file)],
        gpu_ranks.environment(),
        ["--min-np", "1", "--max-np", "2"],
    )

    def steps(worker: int) -> list[dict[str, Any]]:
        return lines(job, worker, "step")

    def until(condition) -> None:
        waiting.until(lambda: job.poll() is not None or condition())
        assert condition(), job.logs()

    until(lambda: all(len(steps(worker)) > 9 for worker in (0, 1)))
    killed = time.monotonic()
    os.kill(job.worker_pid(0), signal.SIGKILL)

    def times_alone() -> list[float]:
        return [line["time"] for line in steps(1) if line["workers"] == [1]]

    until(times_alone)
    record_property("kill -9 to the next commit", f"{times_alone()[0] - killed:.2f} s")
    until(lambda: any(map(steps, NEWCOMERS)))
    newcomer = next(worker for worker in NEWCOMERS if steps(worker))
    joined = next(x["time"] for x in steps(1) if newcomer in x["workers"])
    before = max(time for time in times_alone() if time < joined)
    record_property("standstill while a worker joins", f"{joined - before:.2f} s")
    stop_file.touch()
    assert job.wait() == 0, job.logs()
    first, second = (lines(job, worker, "finished")[0] for worker in (1, newcomer))
    assert (first["step"], first["expected"]) == (second["step"], second["expected"])
    assert first["programs"] == second["programs"] == 1, "a step was compiled again"
    assert first["nccl"] is second["nccl"] is not gpu_ranks.ON_CPU
