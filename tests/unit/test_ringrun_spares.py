"""Tests of spares under ringrun with the real coordinator.

The workers follow the coordinator's protocol without jax and without the native core.
tests/ranks/elastic/test_spares.py tests spares that train.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support import leaks
from support.elastic_member import (
    MEMBER,
    MEMBER_PROGRAM,
    finish,
    ringrun_lines,
    wait_for,
)
from support.launch import Job, StartJob

Begin = Callable[..., Job]
# Spares wait for the coordinator, and not for the file that ends the ranks.
PROGRAM = MEMBER_PROGRAM.replace("while not (", "while epoch < 0 or not (")


@pytest.fixture
def begin(start_job: StartJob, tmp_path: Path) -> Begin:
    """Starts a job of 2 ranks and one spare, and waits until the spare is ready."""

    def start(*options: str, script: str = PROGRAM) -> Job:
        words = ["--min-np", "1", "--spares", "1", *options]
        job = start_job(2, script, {"FOLDER": str(tmp_path)}, words)
        wait_for(job, ") is ready")
        return job

    return start


def test_a_spare_takes_the_place_of_a_lost_rank(begin: Begin, tmp_path: Path) -> None:
    job = begin()
    job.kill(0)
    wait_for(job, "joined as rank 1")
    wait_for(job, "a spare (worker 3")
    assert finish(job, tmp_path) == 0
    # The spare may be a member before the last output of the lost rank has arrived.
    first, *middle, last = ringrun_lines(job)
    assert first == "a spare (worker 2) is ready"
    assert {line.partition(";")[0] for line in middle} == {
        "rank 0 (worker 0) was killed by signal 9 (SIGKILL)",
        "spare worker 2 joined as rank 1",
    }
    assert last == "a spare (worker 3) is ready"
    assert job.launcher_output().count("<stdout>:Dismiss") == 1  # of worker 3


def test_one_hint_for_spares_that_have_compiled_nothing(
    begin: Begin, tmp_path: Path
) -> None:
    job = begin(script=PROGRAM.replace("job.ready()", "job.ready(cold=True)"))
    job.kill(0)
    wait_for(job, ") is ready", 2)
    assert finish(job, tmp_path) == 0
    hint = "call it once in warm_up: @ringjax.elastic.run(warm_up=function)"
    lines = ringrun_lines(job)
    assert lines[1].endswith(hint) and sum(hint in line for line in lines) == 1


def test_a_spare_that_dies_is_replaced(begin: Begin, tmp_path: Path) -> None:
    job = begin()
    for worker in (2, 3, 4):
        os.kill(job.worker_pid(worker), signal.SIGKILL)
        wait_for(job, ") is ready", worker)
    assert finish(job, tmp_path) == 0
    assert [line for line in ringrun_lines(job) if "ready" not in line] == [
        f"a spare (worker {worker}) was killed by signal 9 (SIGKILL)"
        for worker in (2, 3, 4)
    ]
    assert "epoch 1" not in job.launcher_output()


def test_two_ranks_are_lost_at_once(start_job: StartJob, tmp_path: Path) -> None:
    words = ["--min-np", "1", "--spares", "1"]
    job = start_job(3, PROGRAM, {"FOLDER": str(tmp_path)}, words)
    wait_for(job, "a spare (worker 3")
    for pid in [job.rank_pid(rank) for rank in (0, 2)]:
        os.kill(pid, signal.SIGKILL)
    wait_for(job, "; 3 ranks")
    wait_for(job, ") is ready", 2)
    assert finish(job, tmp_path) == 0
    # Its rank depends on whether a commit lies between the two losses.
    joined = "spare worker 3 joined as rank "
    assert any(line.startswith(joined) for line in ringrun_lines(job))


def test_a_spare_group_takes_the_place_of_a_lost_group(
    start_job: StartJob, tmp_path: Path
) -> None:
    words = ["--min-np", "2", "--group-size", "2", "--spares", "2"]
    job = start_job(4, PROGRAM, {"FOLDER": str(tmp_path)}, words)
    wait_for(job, ") is ready", 2)
    job.kill(1)
    wait_for(job, "spare worker 4 joined as rank 2; 4 ranks")
    wait_for(job, "spare worker 5 joined as rank 3; 4 ranks")
    wait_for(job, ") is ready", 4)
    assert finish(job, tmp_path) == 0


def test_a_coordinator_that_is_restarted_knows_the_spare(
    begin: Begin, tmp_path: Path
) -> None:
    job = begin()
    (coordinator,) = [
        pid
        for pid, text in leaks.processes(job.id).items()
        if "ringjax.run.elastic.coordinator_process" in text
    ]
    os.kill(coordinator, signal.SIGKILL)
    wait_for(job, "the coordinator ended (killed by signal 9 (SIGKILL))")
    job.kill(1)
    wait_for(job, "spare worker 2 joined as rank 1; 2 ranks")
    assert finish(job, tmp_path) == 0


def test_a_spare_host_replaces_a_lost_host(
    start_job: StartJob, tmp_path: Path, ssh: dict[str, str]
) -> None:
    words = ["--min-np", "1", "--spares", "1", "-H", "localhost:1,n1:1,n2:1"]
    env = {**ssh, "FOLDER": str(tmp_path)}
    job = start_job(2, PROGRAM, env, words)
    wait_for(job, "a spare (worker 2, on n2")
    stat = Path(f"/proc/{job.rank_pid(1)}/stat").read_text()
    agent = int(stat.rpartition(")")[2].split()[1])  # the parent of the rank
    os.kill(agent, signal.SIGKILL)
    wait_for(job, "spare worker 2 on n2 joined as rank 1; 2 ranks")
    assert finish(job, tmp_path) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_ringrun_makes_spares_leave(
    begin: Begin, number: signal.Signals
) -> None:
    job = begin()
    os.kill(job.pid, number)
    assert job.wait() == 143
    assert job.launcher_output().count("<stdout>:Dismiss") == 3


def test_ctrl_c_ends_spares(begin: Begin) -> None:
    job = begin()
    job.interrupt()
    assert job.wait() == 130  # the fixture checks that no process is left


def test_sigterm_to_a_spare(begin: Begin, tmp_path: Path) -> None:
    job = begin()
    os.kill(job.worker_pid(2), signal.SIGTERM)
    wait_for(job, "a spare (worker 2")
    wait_for(job, " has left")
    assert finish(job, tmp_path) == 0
    assert ringrun_lines(job) == [
        "a spare (worker 2) is ready",
        "a spare (worker 2) has left",
    ]


FAILS = """
job = join_job()
if worker > 1:
    job.report_failure("ValueError: boom")
    sys.exit(5)
follow(job)
"""


def test_spares_that_fail_are_given_up(start_job: StartJob, tmp_path: Path) -> None:
    words = ["--min-np", "1", "--spares", "1"]
    job = start_job(2, MEMBER + FAILS, {"FOLDER": str(tmp_path)}, words)
    wait_for(job, "no more spares are started")
    assert finish(job, tmp_path) == 0
    lines = ringrun_lines(job)
    assert sum("ValueError: boom" in line for line in lines) == 3
    assert lines[0].startswith("a spare (worker 2)")
    assert lines[-1] == (
        "no more spares are started: 3 in a row have failed before they were ready"
    )
