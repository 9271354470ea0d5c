"""Tests of the line about a lost worker, which is shown once in any order of events."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ringjax.run.elastic.elastic_settings import ElasticSettings
from ringjax.run.elastic.replacement_policy import ReplacementPolicy
from ringjax.run.hosts.slots import HostSlots
from ringjax.run.workers import Worker, WorkerTable

KILLED = "rank 1 (worker 1) was killed by signal 9 (SIGKILL); 2 ranks go on"
LOST = "rank 1 (worker 1) was declared lost: it is silent; 2 ranks go on"


class IgnoredSignals:
    """Ignores all signals."""

    def signal(
        self, number: int, names: Sequence[int] | None = None, *, alone: bool = False
    ) -> None:
        pass


class Coordinator:
    """Records workers that have ended. The test sends the coordinator's answers."""

    def __init__(self) -> None:
        self.queried: list[int] = []

    def ended(self, worker: int) -> None:
        self.queried.append(worker)

    def process_ended(self, worker: int, text: str, heirs: bool = True) -> None:
        pass

    def tick(self, now: float) -> None:
        pass


class ShownLines(list[str]):
    """Records the lines that are shown."""

    note = list.append

    def remove(self, worker: int) -> None:
        pass


class LostWorker:
    """A job with three members, in which worker 1 is lost, and the shown lines."""

    def __init__(self) -> None:
        self.shown = ShownLines()
        self.table = WorkerTable(1, lambda number: "", elastic=True)
        elastic = ElasticSettings(np=3, min_np=1, max_np=3)
        self.policy = ReplacementPolicy(
            elastic, self.table, IgnoredSignals(), self.shown
        )  # type: ignore[arg-type]
        self.slots = self.policy.slots
        self.slots.update([HostSlots("localhost", 4)])
        for slot in self.slots.vacant(0, 0.0):
            self.table.add(slot)
        self.table.start_epoch({0: 0, 1: 1, 2: 2}, 0.0)

    @property
    def worker(self) -> Worker:
        return self.table.workers[1]

    def fenced(self, now: float) -> None:
        self.policy.fence(self.worker, "it is silent", now)

    def killed(self, now: float) -> None:
        self.policy.handle_exit(self.worker, 128 + 9, "", now)


@pytest.mark.parametrize("last_words", [0.0, 0.1, 1.0])
def test_a_worker_that_is_fenced_before_its_exit_is_known(last_words: float) -> None:
    # The peers of the worker notice first, and its output arrives later.
    lost = LostWorker()
    lost.fenced(1.0)
    lost.killed(1.01)
    lost.policy.tick(1.02)
    if last_words <= 0.1:
        lost.worker.streams.clear()
    for tick in range(20):
        lost.policy.tick(1.02 + last_words + tick * 0.1)
    assert lost.shown == [KILLED]


def test_a_worker_whose_exit_is_known_first() -> None:
    lost = LostWorker()
    lost.killed(1.0)
    lost.fenced(1.01)
    for tick in range(20):
        lost.policy.tick(1.1 + tick * 0.1)
    assert lost.shown == [KILLED]


def test_a_silent_worker_is_killed() -> None:
    lost = LostWorker()
    lost.fenced(1.0)
    lost.policy.tick(1.1)
    assert lost.shown == []
    lost.policy.tick(1.4)
    assert lost.shown == [LOST]
    lost.policy.tick(1.0 + 5.1)
    assert lost.worker.killed
    lost.killed(6.2)
    for tick in range(20):
        lost.policy.tick(6.3 + tick * 0.1)
    assert lost.shown == [LOST]


@pytest.mark.parametrize("end", [None, 0, 1, 134])
@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_a_worker_that_ends_with_its_group(end: int | None, seconds: float) -> None:
    lost = LostWorker()
    lost.policy.fence(lost.worker, "ended with its group, which lost rank 0", 1.0)
    if end is not None:
        lost.policy.tick(1.0 + seconds)
        lost.policy.handle_exit(lost.worker, end, "", 1.0 + seconds)
    for tick in range(20):
        lost.policy.tick(1.1 + seconds + tick * 0.1)
    text = "rank 1 (worker 1) ended with its group, which lost rank 0; 2 ranks go on"
    assert lost.shown == [text]


@pytest.mark.parametrize(
    ("report", "text"),
    [
        ("TypeError: no", "failed: TypeError: no (it did not end by itself, and"),
        ("", "was declared lost: it is silent (it did not end by itself, and"),
    ],
)
def test_a_worker_that_ringrun_kills_is_not_reported_as_killed_by_the_system(
    report: str, text: str
) -> None:
    lost = LostWorker()
    lost.table.start_epoch({1: 0}, 0.5)
    lost.worker.report = report
    lost.fenced(1.0)
    lost.policy.tick(1.0 + 5.1)
    lost.killed(6.2)
    outcome = lost.table.outcome({})
    assert outcome.exit_code == 1
    assert outcome.reason.startswith(f"rank 0 (worker 1) {text} ringrun killed it")


def test_a_worker_that_the_system_kills_keeps_its_exit_code() -> None:
    lost = LostWorker()
    lost.table.start_epoch({1: 0}, 0.5)
    lost.fenced(1.0)
    lost.killed(1.01)
    assert lost.table.outcome({}).exit_code == 137


@pytest.mark.parametrize("dismissed", [True, False])
def test_an_exit_waits_for_the_coordinators_decision(dismissed: bool) -> None:
    # The worker was asked to leave; the coordinator's decision arrives separately.
    lost, coordinator = LostWorker(), Coordinator()
    lost.policy.coordinator = coordinator  # type: ignore[assignment]
    lost.policy.handle_exit(lost.worker, 0, "", 1.0)
    lost.worker.streams.clear()
    for tick in range(20):
        lost.policy.tick(1.0 + tick)
    assert coordinator.queried == [1]
    assert lost.shown == [] and not lost.slots.closed
    lost.worker.dismissed = dismissed
    lost.worker.coordinator_answered = True
    lost.policy.tick(30.0)
    # Another worker takes the slot, unless the program has reached its end.
    assert len(lost.slots.vacant(2, 30.0)) == int(dismissed)
