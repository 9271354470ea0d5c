"""The line about a lost worker: shown once, whichever event comes first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ringjax.run.elastic.elastic_settings import ElasticSettings
from ringjax.run.elastic.replacement_policy import ReplacementPolicy
from ringjax.run.hosts.slots import HostSlots
from ringjax.run.workers import Worker, WorkerTable

KILLED = "rank 1 (worker 1) was killed by signal 9 (SIGKILL); 2 ranks go on"
LOST = "rank 1 (worker 1) was declared lost: it is silent; 2 ranks go on"


class Nobody:
    """Ignores all signals."""

    def signal(
        self, number: int, names: Sequence[int] | None = None, *, alone: bool = False
    ) -> None:
        pass


class Coordinator:
    """Records workers that have ended; the test answers."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def ended(self, worker: int) -> None:
        self.asked.append(worker)

    def process_ended(self, worker: int, text: str, heirs: bool = True) -> None:
        pass

    def tick(self, now: float) -> None:
        pass


class Said(list[str]):
    """Records the lines that are shown."""

    note = list.append

    def remove(self, worker: int) -> None:
        pass


class Story:
    """A job with three members, and the lines that are shown."""

    def __init__(self) -> None:
        self.said = Said()
        self.table = WorkerTable(1, lambda number: "", elastic=True)
        elastic = ElasticSettings(np=3, min_np=1, max_np=3)
        self.policy = ReplacementPolicy(elastic, self.table, Nobody(), self.said)  # type: ignore[arg-type]
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
def test_a_worker_that_others_miss_before_its_end_is_known(last_words: float) -> None:
    # The peers of the worker notice first, and its output arrives later.
    story = Story()
    story.fenced(1.0)
    story.killed(1.01)
    story.policy.tick(1.02)
    if last_words <= 0.1:
        story.worker.streams.clear()
    for tick in range(20):
        story.policy.tick(1.02 + last_words + tick * 0.1)
    assert story.said == [KILLED]


def test_a_worker_whose_end_is_known_first() -> None:
    story = Story()
    story.killed(1.0)
    story.fenced(1.01)
    for tick in range(20):
        story.policy.tick(1.1 + tick * 0.1)
    assert story.said == [KILLED]


def test_a_worker_that_is_silent_and_is_ended_for_it() -> None:
    story = Story()
    story.fenced(1.0)
    story.policy.tick(1.1)
    assert story.said == []
    story.policy.tick(1.4)
    assert story.said == [LOST]
    story.policy.tick(1.0 + 5.1)
    assert story.worker.killed
    story.killed(6.2)
    for tick in range(20):
        story.policy.tick(6.3 + tick * 0.1)
    assert story.said == [LOST]


@pytest.mark.parametrize("end", [None, 0, 1, 134])
@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_a_worker_that_ends_with_its_group_however_it_ends(
    end: int | None, seconds: float
) -> None:
    story = Story()
    story.policy.fence(story.worker, "ended with its group, which lost rank 0", 1.0)
    if end is not None:
        story.policy.tick(1.0 + seconds)
        story.policy.handle_exit(story.worker, end, "", 1.0 + seconds)
    for tick in range(20):
        story.policy.tick(1.1 + seconds + tick * 0.1)
    text = "rank 1 (worker 1) ended with its group, which lost rank 0; 2 ranks go on"
    assert story.said == [text]


@pytest.mark.parametrize(
    ("report", "text"),
    [
        ("TypeError: no", "failed: TypeError: no (it did not end by itself, and"),
        ("", "was declared lost: it is silent (it did not end by itself, and"),
    ],
)
def test_a_worker_that_we_end_is_not_out_of_memory(report: str, text: str) -> None:
    story = Story()
    story.table.start_epoch({1: 0}, 0.5)
    story.worker.report = report
    story.fenced(1.0)
    story.policy.tick(1.0 + 5.1)
    story.killed(6.2)
    outcome = story.table.outcome({})
    assert outcome.exit_code == 1
    assert outcome.reason.startswith(f"rank 0 (worker 1) {text} ringrun killed it")


def test_a_worker_that_the_system_kills_keeps_its_code() -> None:
    story = Story()
    story.table.start_epoch({1: 0}, 0.5)
    story.fenced(1.0)
    story.killed(1.01)
    assert story.table.outcome({}).exit_code == 137


@pytest.mark.parametrize("dismissed", [True, False])
def test_a_worker_whose_end_is_known_before_its_reason(dismissed: bool) -> None:
    # The worker was asked to leave; the coordinator's decision arrives separately.
    story, coordinator = Story(), Coordinator()
    story.policy.coordinator = coordinator  # type: ignore[assignment]
    story.policy.handle_exit(story.worker, 0, "", 1.0)
    story.worker.streams.clear()
    for tick in range(20):
        story.policy.tick(1.0 + tick)
    assert coordinator.asked == [1]
    assert story.said == [] and not story.slots.closed
    story.worker.dismissed = dismissed
    story.worker.coordinator_answered = True
    story.policy.tick(30.0)
    # Another worker takes the slot, unless the program has reached its end.
    assert len(story.slots.vacant(2, 30.0)) == int(dismissed)
