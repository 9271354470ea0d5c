"""Tests of the slots of an elastic job: when and where a worker is replaced."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ringjax.run.elastic.worker_slots import LONGEST_PAUSE, Blacklist, WorkerSlots
from ringjax.run.hosts.slots import HostSlots, assign_slots
from ringjax.run.workers import WorkerSlot

HOSTS = [HostSlots("a", 2), HostSlots("b", 3)]


def make_slots(
    hosts: list[HostSlots] = HOSTS,
    *,
    first: int = 5,
    most: int = 5,
    least: int = 1,
    blacklist: Blacklist | None = None,
) -> WorkerSlots:
    return WorkerSlots(hosts, first=first, most=most, least=least, blacklist=blacklist)


def fill(job: WorkerSlots, now: float = 0.0) -> list[WorkerSlot]:
    """Starts the workers that are due. Each worker has the number of its slot."""
    taken = [slot for slot in job.slots if slot.worker is not None]
    started = job.vacant(len(taken), now)
    for slot in started:
        slot.worker = slot.number
    return started


def places_of(slots: list[WorkerSlot]) -> list[tuple[str, int]]:
    return [(slot.host, slot.index) for slot in slots]


def test_hosts_are_filled_in_order() -> None:
    job = make_slots(first=3)
    assert places_of(fill(job)) == [("a", 0), ("a", 1), ("b", 0)]
    assert fill(job) == []
    job.grow()
    assert places_of(fill(job)) == [("b", 1), ("b", 2)]


def test_groups_are_started_whole_on_few_hosts() -> None:
    hosts = [HostSlots("a", 2), HostSlots("b", 3)]
    job = WorkerSlots(hosts, first=4, most=4, least=2, blacklist=None, group=2)
    slots = fill(job)
    assert places_of(slots) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    job.grow()
    job.record_failure(slots[2], member_for=9.0, own_fault=True, now=0.0)
    assert fill(job, 0.1) == []  # the other worker of the group has not ended yet
    job.record_failure(slots[3], member_for=9.0, own_fault=False, now=0.2)
    assert places_of(fill(job, 0.3)) == [("b", 0), ("b", 1)]


def test_the_first_slots_equal_those_of_a_static_job() -> None:
    job = make_slots(first=4)
    slots = fill(job)
    assert [job.slot_info(slot) for slot in slots] == assign_slots(HOSTS, 4)


def test_pauses_of_a_failing_slot_grow() -> None:
    job = make_slots([HostSlots("a", 1)], first=1, most=1)
    [slot] = fill(job)
    pauses = []
    now = 0.0
    for _ in range(9):
        pause = job.record_failure(slot, member_for=None, own_fault=True, now=now)
        pauses.append(pause)
        if pause:
            assert fill(job, now + pause - 0.01) == []
        now += pause
        assert fill(job, now) == [slot]
    assert pauses == [0, 1, 2, 4, 8, 16, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    # A worker that was a member for long is replaced at once.
    assert job.record_failure(slot, member_for=60.0, own_fault=True, now=now) == 0


def test_another_slot_is_used_during_a_pause() -> None:
    job = make_slots(first=2, most=2)
    first, _ = fill(job)
    for _ in range(2):
        job.record_failure(first, member_for=None, own_fault=True, now=0.0)
    assert places_of(fill(job)) == [("b", 0)]


def test_a_blacklisted_host_gets_no_worker() -> None:
    blacklist = Blacklist((10.0, 35.0), draw=lambda: 0.0)
    job = make_slots(blacklist=blacklist)
    slots = fill(job)
    for slot in slots[:2]:  # two failures on one host count once
        assert job.record_failure(slot, member_for=9.0, own_fault=True, now=0.0) == 10.0
    assert fill(job, 9.9) == []
    assert places_of(fill(job, 10.0)) == [("a", 0), ("a", 1)]
    assert (
        job.record_failure(slots[0], member_for=9.0, own_fault=True, now=11.0) == 20.0
    )
    assert blacklist.take_announcement("a", 11.0) == 20.0
    assert blacklist.take_announcement("a", 11.0) is None


def test_a_consequential_failure_does_not_blacklist_the_host() -> None:
    blacklist = Blacklist(None)
    job = make_slots(blacklist=blacklist)
    slots = fill(job)
    job.record_failure(slots[0], member_for=9.0, own_fault=False, now=0.0)
    assert fill(job) == [slots[0]]
    assert (
        job.record_failure(slots[4], member_for=9.0, own_fault=True, now=0.0)
        == math.inf
    )
    assert fill(job, 1e9) == []
    assert blacklist.blocks("b", 1e9)


@given(
    least=st.floats(0.1, 100), times=st.floats(1, 50), draws=st.lists(st.floats(0, 1))
)
def test_cooldown_stays_in_its_range(
    least: float, times: float, draws: list[float]
) -> None:
    random = iter(draws)
    blacklist = Blacklist((least, least * times), draw=lambda: next(random))
    now = 0.0
    for _ in draws:
        seconds = blacklist.record_failure("a", now)
        assert least <= seconds <= least * times
        assert blacklist.blocks("a", now + 0.9 * seconds)
        now += seconds
        assert not blacklist.blocks("a", now + 1e-3)


def test_a_worker_that_left_is_replaced_only_below_the_minimum() -> None:
    job = make_slots(first=3, most=3, least=2, hosts=[HostSlots("a", 3)])
    slots = fill(job)
    job.record_leave(slots[1], asked=False)
    assert fill(job) == []
    job.record_failure(slots[2], member_for=60.0, own_fault=True, now=0.0)
    assert fill(job) == [slots[2]]
    job.record_leave(slots[2], asked=False)
    assert fill(job) == [slots[1]]


def test_hosts_may_vanish_and_return() -> None:
    job = make_slots()
    fill(job)
    assert job.update([HostSlots("b", 2), HostSlots("c", 1)]) == [0, 1, 4]
    assert job.update([HostSlots("b", 2), HostSlots("c", 1)]) == []
    assert places_of(job.slots) == [("b", 0), ("b", 1), ("c", 0)]
    assert places_of(job.vacant(2, 0.0)) == [("c", 0)]
    # A host that has returned is used when its former workers have left.
    job.update([HostSlots("b", 2), HostSlots("a", 1)])
    assert places_of(job.slots) == [("b", 0), ("b", 1), ("a", 0)]
    assert job.vacant(2, 0.0) == []
    job.record_leave(job.slots[2], asked=True)
    assert places_of(job.vacant(2, 0.0)) == [("a", 0)]


def test_a_closed_job_starts_no_worker() -> None:
    job = make_slots()
    job.closed = True
    assert fill(job) == []


def test_all_failed() -> None:
    job = make_slots([HostSlots("a", 3)], first=2, most=3)
    assert not job.all_failed()
    first, second = fill(job)
    job.record_failure(first, member_for=None, own_fault=True, now=0.0)
    assert not job.all_failed()
    job.record_failure(second, member_for=None, own_fault=True, now=0.0)
    assert job.all_failed()
