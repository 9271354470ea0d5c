"""Tests of elastic jobs under ringrun with the real coordinator.

The workers follow the coordinator's protocol without jax and without the native core.
"""

from __future__ import annotations

import os
import signal
import time
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
from support.waiting import LONG, until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def start(start_job: StartJob, folder: Path) -> StartJob:
    def begin(np: int, script: str, *options: str) -> Job:
        env = {"FOLDER": str(folder)}
        return start_job(np, script, env, ["--min-np", "1", *options])

    return begin


def test_a_job_without_losses(start: StartJob, folder: Path) -> None:
    job = start(3, MEMBER_PROGRAM)
    for rank in range(3):
        job.wait_for(rank, f"epoch 0 start: {rank}/3")
    assert finish(job, folder) == 0
    assert ringrun_lines(job) == []


def test_a_killed_rank_is_replaced(start: StartJob, folder: Path) -> None:
    job = start(3, MEMBER_PROGRAM, "--min-np", "2")
    job.wait_for(1, "epoch 0 start")
    job.wait_for(2, "epoch 0 start")
    job.kill(1)
    job.wait_for(2, "epoch 1 repair: 1/2")
    job.wait_for(0, "resize: 0/3")
    wait_for(job, "joined as rank 2")
    assert finish(job, folder) == 0
    assert ringrun_lines(job) == [
        "rank 1 (worker 1) was killed by signal 9 (SIGKILL); 2 ranks go on",
        "worker 3 joined as rank 2; 3 ranks",
    ]
    assert "]<stdout>:welcome" in job.launcher_output()
    assert "[2]<stdout>:end" in job.launcher_output()


def test_sigterm_to_a_rank_makes_it_leave(start: StartJob, folder: Path) -> None:
    job = start(3, MEMBER_PROGRAM)
    job.wait_for(0, "epoch 0 start")
    job.kill(2, signal.SIGTERM)
    job.wait_for(2, "Dismiss")
    job.wait_for(0, "resize: 0/2")
    wait_for(job, "has left")
    assert finish(job, folder) == 0
    assert ringrun_lines(job) == ["rank 2 (worker 2) has left; 2 ranks go on"]


@pytest.mark.parametrize("least", ["1", "3"])
def test_sigterm_to_all_ends_the_job(start: StartJob, least: str) -> None:
    job = start(3, MEMBER_PROGRAM, "--min-np", least)
    for rank in range(3):
        job.wait_for(rank, "epoch 0 start")
    pids = [job.rank_pid(rank) for rank in range(3)]
    for pid in pids:
        os.kill(
            pid, signal.SIGSTOP
        )  # so that no worker leaves before all were asked to leave
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert job.wait(20) == 143  # before the limit of 25 s for leaving
    assert ringrun_lines(job)[-1] == "every rank has left, as it was asked to"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_ringrun_makes_all_ranks_leave(
    start: StartJob, number: signal.Signals
) -> None:
    job = start(3, MEMBER_PROGRAM)
    for rank in range(3):
        job.wait_for(rank, "epoch 0 start")
    os.kill(job.pid, number)
    assert job.wait() == 143
    assert all("Dismiss" in job.output(rank) for rank in range(3))
    ends = {signal.SIGTERM: "ended by SIGTERM"}
    assert ringrun_lines(job)[-1] == ends.get(
        number, "every rank has left, as it was asked to"
    )


FAILS = """
job = join_job()
if worker == {worker}:
    job.report_failure("ValueError: boom")
    time.sleep({seconds})  # ringrun may end this process before
    sys.exit(5)
follow(job)
"""


def test_a_rank_with_an_exception_is_reported_and_replaced(
    start: StartJob, folder: Path
) -> None:
    job = start(2, MEMBER + FAILS.format(worker=0, seconds=0.2))
    wait_for(job, "worker 2 joined as rank 1; 2 ranks")
    assert finish(job, folder) == 0
    # ringrun waits 0.3 s for the exit code. test_replacement_policy.py checks which of
    # the two lines is shown.
    assert ringrun_lines(job)[0] in (
        "rank 0 (worker 0) failed: ValueError: boom (exit code 5); 1 rank goes on",
        "rank 0 (worker 0) was declared lost: failed: ValueError: boom; 1 rank goes on",
    )


def test_a_newcomer_that_reports_an_error_and_hangs_is_replaced(
    start: StartJob, folder: Path
) -> None:
    job = start(2, MEMBER + FAILS.format(worker=2, seconds=1000))
    job.wait_for(1, "epoch 0 start")
    job.kill(1)
    wait_for(job, "worker 3 joined as rank 1; 2 ranks")
    assert finish(job, folder) == 0
    assert any(
        "worker 2" in line and "ValueError: boom" in line for line in ringrun_lines(job)
    )


def test_an_error_of_all_ranks_is_the_reason_before_they_exit(
    start: StartJob,
) -> None:
    script = MEMBER + (
        "job = join_job()\njob.report_failure('TypeError: boom')\ntime.sleep(1000)\n"
    )
    job = start(2, script, "--min-np", "2")
    assert job.wait() == 1, job.launcher_output()
    assert "failed: TypeError: boom" in ringrun_lines(job)[-1]


def test_fewer_than_min_np(start: StartJob) -> None:
    script = MEMBER + "if worker > 1: time.sleep(1000)\nfollow(join_job())\n"
    job = start(2, script, "--min-np", "2", "--elastic-timeout", "1")
    job.wait_for(0, "epoch 0 start")
    job.kill(1)
    assert job.wait() == 1
    last = ringrun_lines(job)[-1]
    assert "2" in last and "1 s" in last, last


def test_the_start_timeout_ends_a_job(start: StartJob) -> None:
    script = MEMBER + "if worker > 0: time.sleep(1000)\nfollow(join_job())\n"
    job = start(3, script, "--min-np", "2", "--start-timeout", "1")
    assert job.wait() == 1
    assert ringrun_lines(job)[-1].startswith("the job did not start: ")


@pytest.fixture
def two_hosts(start_job: StartJob, folder: Path, ssh: dict[str, str]) -> Job:
    """Runs rank 0 on this host, and ranks 1 and 2 on host n1."""
    env = {**ssh, "FOLDER": str(folder)}
    job = start_job(3, MEMBER_PROGRAM, env, ["--min-np", "1", "-H", "localhost:1,n1:2"])
    job.wait_for(2, "epoch 0 start")
    return job


def _calls(folder: Path) -> int:
    """Returns how often ringrun connected to the other host."""
    return (folder / "ssh.log").read_text().count(" n1 ")


def _agents(job: Job, *, here: bool) -> list[int]:
    """Returns the agents that ringrun has started itself, or those behind a client."""
    agents = [
        pid
        for pid, text in leaks.processes(job.id).items()
        if "ringjax.run.hosts.agent" in text
    ]
    return [pid for pid in agents if (_parent(pid) == job.pid) == here]


def test_a_lost_host_is_connected_again(two_hosts: Job, folder: Path) -> None:
    job = two_hosts
    [agent] = _agents(job, here=False)
    os.kill(agent, signal.SIGKILL)
    wait_for(job, "joined as rank 1")
    wait_for(job, "joined as rank 2")
    assert finish(job, folder) == 0
    lost = "lost its host, ssh ended (137)"
    assert ringrun_lines(job)[:2] == [
        f"rank 1 (worker 1, on n1): {lost}; 1 rank goes on",
        f"rank 2 (worker 2, on n1): {lost}; 1 rank goes on",
    ]
    assert _calls(folder) == 2


def test_the_agent_of_the_first_host_is_replaced(two_hosts: Job, folder: Path) -> None:
    """Other hosts continue, because the clients that reach them do not end."""
    job = two_hosts
    [agent] = _agents(job, here=True)
    os.kill(agent, signal.SIGKILL)
    wait_for(job, "worker 3 on localhost joined as rank 2; 3 ranks")
    first = "rank 0 (worker 0, on localhost): its agent on this host died"
    assert ringrun_lines(job)[0] == f"{first}; 2 ranks go on"
    assert _calls(folder) == 1
    [agent] = _agents(
        job, here=False
    )  # ringrun notices the end of the client without its agent
    os.kill(agent, signal.SIGKILL)
    wait_for(job, "on n1 joined as rank 1")
    wait_for(job, "on n1 joined as rank 2; 3 ranks")
    assert finish(job, folder) == 0
    assert "rank 0 (worker 1, on n1): lost its host; 1 rank goes on" in ringrun_lines(
        job
    )
    assert _calls(folder) == 2


def _parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def _coordinator(job: Job) -> int:
    """Waits for the coordinator's process and returns its id."""
    deadline = time.monotonic() + LONG
    while True:
        pids = [
            pid
            for pid, text in leaks.processes(job.id).items()
            if "ringjax.run.elastic.coordinator_process" in text
        ]
        if len(pids) == 1:
            return pids[0]
        assert time.monotonic() < deadline, (pids, job.logs())
        time.sleep(0.02)


def test_a_killed_coordinator_is_restarted(start: StartJob, folder: Path) -> None:
    job = start(3, MEMBER_PROGRAM)
    job.wait_for(2, "epoch 0 start")
    os.kill(_coordinator(job), signal.SIGKILL)
    wait_for(job, "the coordinator ended (killed by signal 9 (SIGKILL))")
    job.kill(1)
    wait_for(job, "worker 3 joined as rank 2; 3 ranks")
    os.kill(_coordinator(job), signal.SIGKILL)
    wait_for(job, "the coordinator ended", 2)
    assert finish(job, folder) == 0
    lines = [line for line in ringrun_lines(job) if "coordinator" not in line]
    assert lines == [
        "rank 1 (worker 1) was killed by signal 9 (SIGKILL); 2 ranks go on",
        "worker 3 joined as rank 2; 3 ranks",
    ]


def test_a_stopped_coordinator_is_restarted(start: StartJob, folder: Path) -> None:
    job = start(2, MEMBER_PROGRAM)
    job.wait_for(1, "epoch 0 start")
    os.kill(_coordinator(job), signal.SIGSTOP)
    wait_for(job, "the coordinator has not answered for 5 s; it is ended")
    wait_for(job, "the coordinator ended (killed by signal 9 (SIGKILL))")
    # All workers are members as before, and the new coordinator works.
    job.kill(1)
    wait_for(job, "worker 2 joined as rank 1; 2 ranks")
    assert finish(job, folder) == 0
    assert [line for line in ringrun_lines(job) if "coordinator" not in line] == [
        "rank 1 (worker 1) was killed by signal 9 (SIGKILL); 1 rank goes on",
        "worker 2 joined as rank 1; 2 ranks",
    ]


def test_a_rank_and_the_coordinator_are_killed_together(
    start: StartJob, folder: Path
) -> None:
    job = start(3, MEMBER_PROGRAM)
    job.wait_for(2, "epoch 0 start")
    coordinator = _coordinator(job)
    job.kill(1)
    os.kill(coordinator, signal.SIGKILL)
    wait_for(job, "worker 3 joined as rank 2; 3 ranks")
    assert finish(job, folder) == 0


def test_a_coordinator_that_always_dies_ends_the_job(start: StartJob) -> None:
    job = start(2, MEMBER_PROGRAM)
    job.wait_for(1, "epoch 0 start")
    for number in range(6):
        wait_for(job, "it is started again", number)
        os.kill(_coordinator(job), signal.SIGKILL)
    assert job.wait() == 1
    assert "the coordinator ends again and again" in ringrun_lines(job)[-1]


# The first two workers never commit, so no other worker can join them.
NEVER_COMMIT = (
    MEMBER.replace("case ResizePending():", "case ResizePending() if worker > 1:")
    + """
job = join_job()
signal.signal(signal.SIGUSR1, lambda *_: (job.report_failure("boom"), sys.exit(5)))
follow(job)
"""
)


def start_last_member(start: StartJob, folder: Path) -> tuple[Job, int]:
    """Starts a job, and waits until one member is left and a newcomer is ready."""
    job = start(2, NEVER_COMMIT)
    job.wait_for(1, "epoch 0 start")
    first = job.rank_pid(0)
    job.kill(1)
    wait_for(job, "1 rank goes on")
    until((folder / "ready 2").exists)
    return job, first


def test_newcomers_restart_after_the_last_member_is_killed(
    start: StartJob, folder: Path
) -> None:
    job, last = start_last_member(start, folder)
    os.kill(last, signal.SIGKILL)
    wait_for(job, "the last rank is lost: newcomers begin afresh")
    wait_for(job, "start: 0/1")
    wait_for(job, "worker 3 joined as rank 1; 2 ranks")
    assert finish(job, folder) == 0


def test_an_error_of_the_last_member_ends_the_job(
    start: StartJob, folder: Path
) -> None:
    job, last = start_last_member(start, folder)
    os.kill(last, signal.SIGUSR1)
    assert job.wait() == 5, job.launcher_output()
    assert ringrun_lines(job)[-1] == "rank 0 (worker 0) failed: boom (exit code 5)"


def test_the_job_ends_with_its_last_member(start: StartJob) -> None:
    script = MEMBER + "if worker > 1: time.sleep(1000)\nfollow(join_job())\n"
    job = start(2, script)
    job.wait_for(1, "epoch 0 start")
    job.kill(1)
    wait_for(job, "1 rank goes on")
    job.wait_for(
        0, ": 0/1"
    )  # earlier, both workers would be members of the failed epoch
    job.kill(0)
    assert job.wait() == 137
    assert (
        ringrun_lines(job)[-1] == "rank 0 (worker 0) was killed by signal 9 (SIGKILL)"
    )
