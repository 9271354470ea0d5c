"""Tests of the coordinator's rules about groups of workers in an elastic job."""

from __future__ import annotations

from typing import Any

import pytest
from support.membership_job import Job

from ringjax.control.worker_address import WorkerAddress
from ringjax.membership import assembly, directives
from ringjax.membership.directives import EpochDirective
from ringjax.world import groups

PAIRS: dict[str, Any] = {"group": 2}


def started(np: int = 4, min_np: int = 2, max_np: int = 0) -> Job:
    job = Job(np, min_np, max_np, **PAIRS)
    return job.hello(*range(np))


def end(job: Job, worker: int, why: str = "was killed") -> None:
    """Ends the process of a worker and its connection."""
    job.membership.process_ended(worker, why, job.now)
    job.membership.on_disconnected(worker, "EOF", job.now)
    job.take()


def fenced(job: Job) -> dict[int, str]:
    return {news[1]: news[2] for news in job.news if news[0] == "fenced"}


def test_a_job_starts_with_complete_groups() -> None:
    job = Job(4, 2, **PAIRS).hello(0, 1, 2)
    assert job.membership.phase == "assembly"
    job.wait(120)
    assert job.order() == [0, 1]  # worker 3 of the second group has not joined
    job.hello(3)
    welcome = job.last(3, "welcome")
    assert (welcome["rank"], welcome["size"], len(welcome["mates"])) == (3, 4, 2)
    assert job.last(2, "welcome")["rank"] == 2


def test_a_lost_member_removes_its_group() -> None:
    job = started()
    end(job, 2)
    job.report(0, 1)
    assert job.order() == [0, 1]
    assert fenced(job) == {
        2: "was killed",
        3: "ended with its group, which lost rank 2 (was killed)",
    }
    assert job.last(3)["type"] == "fenced"
    members = job.last(0, "members")
    assert members["kind"] == "repair" and members["group"] == 2
    assert set(members["lost"]) == {"2", "3"}


def test_ranks_stay_in_the_order_of_groups_and_places() -> None:
    job = started(6)
    end(job, 3)
    job.report(0, 1, 4, 5)
    assert job.order() == [0, 1, 4, 5]
    job.hello(7, 6)
    for worker in (7, 6):
        job.say(worker, "ready")
    for worker in (0, 1, 4, 5):
        job.say(worker, "pause", number=1)
    assert job.order() == [0, 1, 4, 5, 6, 7]


def test_a_group_joins_when_all_its_workers_are_ready() -> None:
    job = started(4, 2, 6)
    job.hello(4)
    assert 4 not in job.mail  # its group is incomplete
    job.hello(5)
    job.say(4, "ready")
    assert "update" not in {m["type"] for m in job.mail[0]}
    job.say(5, "ready")
    assert job.last(0, "update")["joining"] == 2


def test_a_group_with_an_ended_worker_never_joins() -> None:
    job = started(4, 2, 6)
    job.hello(4)
    end(job, 5)  # worker 5 had not connected yet
    assert fenced(job) == {4: "ended with its group, which lost worker 5 (was killed)"}
    assert job.last(4)["type"] == "fenced"
    job.hello(6, 7)
    job.say(7, "failure", text="ValueError: no")
    assert fenced(job)[6] == (
        "ended with its group, which lost worker 7 (failed: ValueError: no)"
    )


def test_a_group_may_end_before_the_start() -> None:
    job = Job(4, 2, **PAIRS).hello(0, 1, 3)
    end(job, 2)
    assert fenced(job) == {3: "ended with its group, which lost worker 2 (was killed)"}
    job.wait(120)
    assert job.order() == [0, 1]


def test_no_more_groups_than_max_np() -> None:
    job = started(4, 2, 4)
    job.hello(4, 5)
    for worker in (4, 5):
        job.say(worker, "ready")
    assert "update" not in {m["type"] for m in job.mail[0]}


def test_a_leaving_member_takes_its_group_along() -> None:
    job = started()
    job.say(3, "leaving")
    assert job.last(0, "update")["leaving"] == 2
    for worker in range(4):
        job.say(worker, "pause", number=1)
    assert job.order() == [0, 1]
    assert {job.last(w)["type"] for w in (2, 3)} == {"dismissed"}
    end(job, 3)
    assert not fenced(job)


def test_a_group_that_finishes_is_not_lost() -> None:
    job = started()
    job.say(2, "leave", lines={})
    end(job, 2)
    job.say(3, "leave", lines={})
    end(job, 3)
    assert not fenced(job)


@pytest.mark.parametrize("order", [(0, 1, 3), (3, 1, 0)])
def test_a_restarted_coordinator_removes_groups_of_missing_members(
    order: tuple[int, ...],
) -> None:
    before = started()
    members = before.last(0, "members")
    job = Job(4, 2, resume=True, **PAIRS)
    memory = {"term": 0, "epoch": 0, "members": members, "finished": {}}
    for worker in order:
        job.hello(worker, rejoin=memory)
    job.membership.process_ended(2, "was killed", job.now)
    job.take()
    assert set(fenced(job)) == {2, 3}
    job.report(0, 1)
    assert job.order() == [0, 1]


def test_a_restarted_coordinator_keeps_groups_of_finished_workers() -> None:
    members = started().last(0, "members")
    job = Job(4, 2, resume=True, **PAIRS)
    job.membership.mark_finished(2, job.now)
    memory = {"term": 0, "epoch": 0, "members": members, "finished": {}}
    for worker in (0, 1, 3):
        job.hello(worker, rejoin=memory)
    end(job, 2, "ended")
    assert not fenced(job)


def test_a_welcome_lists_the_members_of_the_group() -> None:
    mates = [WorkerAddress("h", "h:1", group_port=5), WorkerAddress("g", "g:1")]
    message = {"type": "welcome", "epoch": 3, "rank": 5, "size": 6, "why": ""}
    entries = [mate.to_json() for mate in mates]
    order = directives.parse({**message, "mates": entries}, 7)
    assert isinstance(order, directives.Welcome)
    assert (list(order.group_addresses), order.group) == (mates, 2)


def test_a_group_receives_its_addresses() -> None:
    job = Job(6, group=3)
    for worker in range(6):
        job.hello(worker, addresses=f"h:{worker}", machine="m")
    for worker in range(6):
        order = directives.parse(job.last(worker, "members"), worker)
        assert isinstance(order, EpochDirective) and order.group == 3
        first = worker - worker % 3
        ports = [each.addresses for each in order.group_addresses]
        assert ports == [f"h:{w}" for w in range(first, first + 3)]


def test_ranks_of_a_job_that_stops_say_the_size_of_groups() -> None:
    job = Job(4, on_loss="stop")
    for rank in range(4):
        job.hello(rank, size=4, settings={"group_size": 2}, addresses=f"h:{rank}")
    order = directives.parse(job.last(3, "members"), 3)
    assert isinstance(order, EpochDirective) and order.group == 2
    assert [each.addresses for each in order.group_addresses] == ["h:2", "h:3"]


def test_replicas_of_groups_of_three() -> None:
    workers = [0, 1, 2, 6, 7, 8]  # the second group was lost
    found = [groups.replicas(workers, worker, 3) for worker in workers]
    assert found == [[0, 3], [1, 4], [2, 5]] * 2
    for rank, worker in enumerate(workers):
        group = groups.Group(3)
        assert group.update(workers, worker) == group.replicas == found[rank]


def test_whole_groups() -> None:
    rules = assembly.MembershipConfig(6, 2, 6, group=3)
    assert list(rules.group_of(4)) == [3, 4, 5]
    assert rules.complete_groups([0, 1, 3, 4, 5, 8]) == [3, 4, 5]


def test_a_newcomer_leaves_with_its_group() -> None:
    job = started(2).hello(4, 5)
    job.say(5, "leaving")
    assert {job.last(worker)["type"] for worker in (4, 5)} == {"dismissed"}
    assert job.order() == [0, 1]
