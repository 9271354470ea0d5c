"""Tests of the rules about spares, with a clock that the tests set."""

from __future__ import annotations

from ringjax.run.elastic.elastic_settings import ElasticSettings
from ringjax.run.elastic.spares import Spares
from ringjax.run.elastic.worker_slots import WorkerSlots
from ringjax.run.hosts.slots import HostSlots
from ringjax.run.workers import Worker, WorkerTable


class SpareJob:
    """A job of two ranks, 0 and 1, with worker 2 as its spare, and the shown lines."""

    def __init__(self, spares: int = 1) -> None:
        self.shown: list[str] = []
        self.table = WorkerTable(1, lambda number: "", elastic=True)
        settings = ElasticSettings(np=2, min_np=1, max_np=2, spares=spares)
        self.slots = WorkerSlots(
            [HostSlots("localhost", 9)], first=2, most=3, least=1, blacklist=None
        )
        self.spares = Spares(settings, self.table, self.slots, self.shown.append)
        self.add(2)
        self.table.start_epoch({0: 0, 1: 1}, 0.0)
        self.slots.grow()

    def add(self, count: int) -> list[Worker]:
        """Starts workers in the first slots that are free."""
        free = [slot for slot in self.slots.slots if slot.worker is None]
        workers = [self.table.add(slot) for slot in free[:count]]
        self.spares.mark_new(workers)
        return workers

    def make_ready(self, worker: Worker) -> None:
        worker.ready = True
        self.spares.tick(0.0, silent=False)

    def end(self, number: int, code: int = 137) -> None:
        self.table.record_end(self.table.workers[number], code, "", 0.0)


def test_the_next_spare_starts_after_a_spare_has_joined() -> None:
    job = SpareJob()
    (spare,) = job.add(1)
    job.make_ready(spare)
    assert not job.spares.wait_for_joins(10.0)
    job.end(1)
    assert job.spares.wait_for_joins(20.0) and job.spares.wait_for_joins(20.3)
    job.table.start_epoch({0: 0, 2: 1}, 20.4)
    assert job.spares.wait_for_joins(20.4) and job.spares.wait_for_joins(21.2)
    assert not job.spares.wait_for_joins(21.4)


def test_the_next_spare_starts_if_no_rank_commits() -> None:
    job = SpareJob()
    (spare,) = job.add(1)
    job.make_ready(spare)
    job.end(0)
    assert job.spares.wait_for_joins(20.0) and job.spares.wait_for_joins(24.9)
    assert not job.spares.wait_for_joins(25.1)


def test_no_spare_is_waited_for_that_cannot_join_soon() -> None:
    job = SpareJob()
    (spare,) = job.add(1)
    job.end(0)
    assert not job.spares.wait_for_joins(1.0)  # it still compiles
    job.make_ready(spare)
    job.end(1)
    assert not job.spares.wait_for_joins(2.0)  # two are lost, and one is ready


def test_only_workers_without_a_place_are_spares() -> None:
    job = SpareJob()
    job.end(1)
    replacement, spare = job.add(2)
    assert (replacement.spare, spare.spare) == (False, True)
    assert job.spares.states() == [(3, "localhost", False)]
    job.make_ready(replacement)
    assert job.shown == []  # the job has a place for it
    job.table.start_epoch({0: 0, 2: 1}, 1.0)
    job.make_ready(spare)
    job.make_ready(spare)
    assert job.shown == ["a spare (worker 3) is ready"]


def test_three_failures_in_a_row_are_enough() -> None:
    job = SpareJob()
    ready = 0
    for failures in (2, 3):
        for _ in range(failures):
            (spare,) = job.add(1)
            job.spares.record_failure(spare, own_fault=True)
            job.end(spare.number, 1)
        if failures == 2:
            (spare,) = job.add(1)
            job.make_ready(spare)
            job.spares.record_failure(spare, own_fault=True)  # it had been ready
            job.end(spare.number)
            ready += 1
    assert len(job.shown) == ready + 1
    assert job.shown[-1].startswith("no more spares are started: 3 in a row")
    assert job.slots.vacant(2, 99.0) == []
    assert len(job.slots.vacant(1, 99.0)) == 1  # ranks are still replaced


def test_a_failure_with_the_group_does_not_count() -> None:
    job = SpareJob()
    for _ in range(3):
        (spare,) = job.add(1)
        job.spares.record_failure(spare, own_fault=False)
        job.end(spare.number, 1)
    assert job.shown == []


def test_the_job_waits_for_the_end_of_spares_but_not_forever() -> None:
    job = SpareJob()
    (spare,) = job.add(1)
    job.make_ready(spare)
    assert not job.spares.ended
    for number in (0, 1):
        job.end(number, 0)
        job.table.workers[number].settled = True
    for now, ended in ((5.0, False), (7.9, False), (8.1, True)):
        job.spares.tick(now, silent=False)
        assert job.spares.ended == ended


def test_without_spares_nothing_is_marked_or_awaited() -> None:
    job = SpareJob(spares=0)
    (more,) = job.add(1)
    job.make_ready(more)
    job.end(1)
    assert job.spares.ended and not job.spares.wait_for_joins(1.0)
    assert not more.spare and job.shown == [] and job.spares.states() == []
