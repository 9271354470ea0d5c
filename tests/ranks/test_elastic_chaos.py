"""Chaos: workers die, freeze and leave, and training goes on without losing a step.

After every story, all steps are computed again in one process, see chaos.py. What
`make soak` does for hours.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from chaos import SILENCE, Chaos
from launch import StartJob

SEED = 20  # of the moments; what happens at them is up to the machine


@pytest.mark.timeout(150)
def test_a_killed_worker_costs_no_step(start_job: StartJob, tmp_path: Path) -> None:
    chaos, chance = Chaos(start_job, tmp_path, np=3), random.Random(SEED)
    training = chaos.wait_for(3)
    chaos.do("kill", max(training), training[max(training)], chance)
    chaos.wait_for_steps(50)
    chaos.wait_for(3)  # another worker takes its place
    verdict = chaos.end()
    assert len(verdict.recoveries) == 2
    assert max(verdict.recoveries) < 2
    assert (verdict.smallest, verdict.largest) == (2, 3)


@pytest.mark.timeout(150)
def test_rank_0_may_die_as_well(start_job: StartJob, tmp_path: Path) -> None:
    chaos, chance = Chaos(start_job, tmp_path, np=3), random.Random(SEED)
    training = chaos.wait_for(3)
    chaos.do("kill", min(training), training[min(training)], chance)
    chaos.wait_for_steps(50)
    assert chaos.end().smallest == 2


@pytest.mark.timeout(150)
def test_two_die_at_once(start_job: StartJob, tmp_path: Path) -> None:
    chaos, chance = Chaos(start_job, tmp_path, np=4), random.Random(SEED)
    training = chaos.wait_for(4)
    for worker in sorted(training)[1:3]:
        chaos.do("kill", worker, training[worker], chance)
    chaos.wait_for_steps(50)
    assert chaos.end().smallest <= 2


@pytest.mark.timeout(150)
def test_all_but_one_die(start_job: StartJob, tmp_path: Path) -> None:
    chaos, chance = Chaos(start_job, tmp_path, np=3), random.Random(SEED)
    training = chaos.wait_for(3)
    for worker in sorted(training)[:2]:
        chaos.do("kill", worker, training[worker], chance)
        chaos.wait_for_steps(3)
    chaos.wait_for(3)
    assert chaos.end().smallest == 1


@pytest.mark.timeout(150)
def test_a_short_freeze_is_no_loss(start_job: StartJob, tmp_path: Path) -> None:
    chaos, chance = Chaos(start_job, tmp_path, np=2), random.Random(SEED)
    training = chaos.wait_for(2)
    chaos.do("freeze", max(training), training[max(training)], chance)
    chaos.wait_for_steps(50)
    assert chaos.end().smallest == 2


@pytest.mark.timeout(150)
def test_a_long_freeze_is_a_loss_and_the_frozen_one_must_not_go_on(
    start_job: StartJob, tmp_path: Path
) -> None:
    chaos, chance = Chaos(start_job, tmp_path, np=3), random.Random(SEED)
    training = chaos.wait_for(3)
    frozen = max(training)
    before = time.monotonic()
    chaos.do("fence", frozen, training[frozen], chance)
    assert time.monotonic() - before > SILENCE
    chaos.wait_for_steps(50)
    deadline = time.monotonic() + 20
    while frozen in chaos.pids():
        assert time.monotonic() < deadline, chaos.logs()
        time.sleep(0.05)
    assert chaos.end().smallest == 2  # and it contributed to nothing afterwards


@pytest.mark.timeout(150)
def test_a_worker_that_is_asked_to_leave_costs_nothing(
    start_job: StartJob, tmp_path: Path
) -> None:
    chaos, chance = Chaos(start_job, tmp_path, np=3), random.Random(SEED)
    training = chaos.wait_for(3)
    chaos.do("term", max(training), training[max(training)], chance)
    deadline = time.monotonic() + 30
    while max(training) in chaos.pids():
        assert time.monotonic() < deadline, chaos.logs()
        time.sleep(0.05)
    chaos.wait_for_steps(50)
    assert chaos.end().smallest == 2
