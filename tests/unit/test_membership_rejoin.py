"""Tests of members that rejoin a restarted coordinator."""

from __future__ import annotations

from typing import Any

from support.membership_job import Job, started


def memory_of(job: Job, worker: int) -> dict[str, Any]:
    members = job.last(worker, "members")
    return {"term": members["term"], "epoch": members["epoch"], "members": members}


def test_members_rejoin_a_new_coordinator() -> None:
    old = started(3)
    job = Job(3).hello(2, rejoin=memory_of(old, 2)).hello(9)
    job.hello(0, rejoin=memory_of(old, 0))
    assert job.membership.phase == "assembly"
    job.hello(1, rejoin=memory_of(old, 1))
    assert (job.epoch, job.order()) == (0, [0, 1, 2])
    assert job.last(1) == {"type": "resumed", "epoch": 0, "term": 1}
    assert job.last(9)["type"] == "welcome"


def test_members_that_do_not_rejoin_are_lost() -> None:
    old = started(5)
    job = Job(5).hello(2, rejoin=memory_of(old, 2))
    job.wait(3)
    job.hello(0, rejoin=memory_of(old, 0))
    assert job.membership.phase == "assembly"  # two of five are no majority
    job.hello(4, rejoin=memory_of(old, 4))
    job.report(0, 2, 4)
    assert (job.epoch, job.order()) == (1, [0, 2, 4])
    job.hello(1, rejoin=memory_of(old, 1))
    assert job.last(1)["type"] == "fenced"


def test_a_second_new_coordinator() -> None:
    old = started(2)
    # Worker 0 alone has joined the first new coordinator, whose term is 1.
    memories = [memory_of(old, 0) | {"term": 1}, memory_of(old, 1)]
    job = Job(2)
    for worker, memory in enumerate(memories):
        job.hello(worker, rejoin=memory)
    for worker in (0, 1):
        assert job.mail[worker] == [{"type": "resumed", "epoch": 0, "term": 2}]


def test_a_member_that_missed_an_epoch_receives_it() -> None:
    old = started(3)
    before = memory_of(old, 1)
    old.lose(0)
    old.report(1, 2)
    job = Job(3).hello(1, rejoin=before).hello(2, rejoin=memory_of(old, 2))
    assert [m["type"] for m in job.mail[1]] == ["members", "resumed"]
    assert [m["type"] for m in job.mail[2]] == ["resumed"]
    assert job.order() == [1, 2]


def test_a_resuming_coordinator_starts_no_new_job() -> None:
    job = Job(2, resume=True).hello(7, 8)
    job.wait(599)
    assert job.epoch == -1
    job.wait(5)
    assert job.news[0][0] == "stop"


def test_finished_members_are_not_awaited() -> None:
    old = started(3)
    old.say(0, "leave", lines={"0": (4, 4, True)})
    memory = memory_of(old, 1) | {"finished": {"0": {"0": (4, 4, True)}}}
    job = Job(3, 3).hello(1, rejoin=memory).hello(2, rejoin=memory)
    assert job.membership.phase == "run"
    job.lose(2)
    job.report(1, line=(3, 3, True))
    assert job.last(1)["verdicts"] == {"0": (4, True)}
