"""Elastic jobs whose ranks form groups: ringrun loses and replaces groups whole.

support/group_jobs.py has the training program and the checks of its steps. A process
with several devices is a group of one. test_group_hosts.py tests groups over several
hosts.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable

import pytest
from support import local_devices
from support.group_jobs import (
    STEPS,
    finish_and_check,
    lines,
    wait_for_steps,
    wait_until_joined,
)
from support.launch import Job, StartJob
from support.waiting import until

from ringjax.settings import mpi_library

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def start(start_job: StartJob) -> Callable[..., Job]:
    def begin(np: int, group: int = 2, devices: int = 1, **env: str) -> Job:
        # With the variable that ringrun would set, a warm server can fork the ranks.
        library = mpi_library.variables({mpi_library.SWITCH: "1"})
        variables = {**local_devices.environment(devices)(), **library, **env}
        words = ["--group-size", str(group), "--min-np", str(group)]
        return start_job(np, STEPS, variables, words)

    return begin


@pytest.mark.parametrize("switch", ["0", "1", ""])
def test_the_group_of_a_lost_rank_is_replaced_whole(
    start: Callable[..., Job], switch: str
) -> None:
    """Kills ranks 0, 3 and 1, of the first, the second and again the first group."""
    job = start(4, RINGJAX_JAX_COLLECTIVES=switch)
    wait_for_steps(job, {0, 1, 2, 3}, 10)
    alive, newest = {0, 1, 2, 3}, 4
    for victim in (0, 5, 3):
        os.kill(job.worker_pid(victim), signal.SIGKILL)
        alive -= {victim, victim ^ 1}
        wait_until_joined(job, newest)
        wait_until_joined(job, newest + 1)
        count = len(lines(job, min(alive), "step"))
        wait_for_steps(job, alive, count + 10)
        # The new group has ranks 2 and 3, after the group that stayed. The new workers
        # have the positions 0 and 1 in their group.
        assert lines(job, newest, "from")[0][1:] == ["2", "4", "0", "2"]
        assert lines(job, newest + 1, "from")[0][1:] == ["3", "4", "1", "3"]
        alive |= {newest, newest + 1}
        newest += 2
    finish_and_check(job, alive)
    carrier = "Gloo" if switch == "0" else "ringjax"
    assert all(lines(job, w, "carried") == [[carrier]] for w in alive)
    output = job.launcher_output()
    for victim, rank in ((0, 0), (5, 3), (3, 1)):
        assert f"rank {rank} (worker {victim}, pid" in output
        why = rf"ended with its group, which lost rank {rank} \(.*\); 2 ranks go on"
        mate = rf"rank {rank ^ 1} \(worker {victim ^ 1}, pid \d+\)"
        assert re.search(f"{mate} {why}", output), output


def test_after_a_kill_within_a_call_all_shards_agree_about_the_members(
    start: Callable[..., Job],
) -> None:
    kills = "call.moving=kill@2#31;call.complete=kill@5#54;call.closed=kill@6#77"
    job = start(8, RINGJAX_FAILPOINTS=kills)
    wait_for_steps(job, {0, 1}, 100)
    finish_and_check(job, {0, 1})
    output = job.launcher_output()
    for victim in (2, 5, 6):
        assert f"(worker {victim}, pid" in output


def test_ranks_of_several_devices_are_replaced_and_get_their_shards(
    start: Callable[..., Job],
) -> None:
    job = start(2, group=1, devices=4)
    wait_for_steps(job, {0, 1}, 10)
    os.kill(job.rank_pid(0), signal.SIGKILL)
    wait_until_joined(job, 2)
    count = len(lines(job, 1, "step"))
    wait_for_steps(job, {1}, count + 10)
    finish_and_check(job, {1, 2})


def test_ranks_of_groups_are_killed_at_random_moments(
    start: Callable[..., Job],
) -> None:
    rng = random.Random(1)
    job = start(6)
    wait_for_steps(job, set(range(6)), 5)
    newest, alive = 6, {0, 1, 2, 3, 4, 5}
    for _ in range(4):
        time.sleep(rng.random())
        victim = rng.choice(sorted(alive))
        os.kill(job.worker_pid(victim), signal.SIGKILL)
        alive -= {victim, victim ^ 1}
        for worker in (newest, newest + 1):
            wait_until_joined(job, worker)
            alive.add(worker)
        newest += 2
    wait_for_steps(job, alive, 5)
    finish_and_check(job, alive)


def test_a_group_leaves_whole_at_sigterm(
    start: Callable[..., Job],
) -> None:
    job = start(4)
    wait_for_steps(job, {0, 1, 2, 3}, 10)
    os.kill(job.rank_pid(2), signal.SIGTERM)
    until(lambda: job.launcher_output().count("has left") == 2, 60)
    count = len(lines(job, 0, "step"))
    wait_for_steps(job, {0, 1}, count + 20)
    finish_and_check(job, {0, 1})
    output = job.launcher_output()
    assert "rank 2 (worker 2" in output and "rank 3 (worker 3" in output
    assert len(re.findall("has left", output)) == 2, output
    assert "lost" not in output, output
