"""Tests of the marks of time in a process, with a clock and a recorder of the test."""

from __future__ import annotations

from typing import Any

import pytest

import ringjax
from ringjax.monitor.time_report import TimeReport
from ringjax.world.recorder import RECORDER_CAPACITY
from ringjax.world.time_spent import TimeSpent


class Process:
    """A process whose time passes only in the calls of a test."""

    def __init__(self) -> None:
        self.now, self.waited = 100.0, 0.0
        self.calls: list[dict[str, Any]] = []
        self.spent = TimeSpent(lambda: self.now)
        self.spent.begin(self)  # type: ignore[arg-type]

    def busy(self) -> tuple[float, float]:
        return self.waited, 0.0

    @property
    def count(self) -> int:
        return len(self.calls)

    def events(self) -> list[dict[str, Any]]:
        return self.calls

    def run(self, seconds: float) -> None:
        self.now += seconds

    def call(self, waits: float = 0.0, name: str = "g") -> None:
        """Makes a call that waits for other ranks, and moves data for 0.1 s."""
        entered, agreed = self.now, self.now + waits
        self.now, self.waited = agreed + 0.1, self.waited + waits
        key = {"lane": "named", "set": 0, "op": "allreduce", "bytes": 4, "name": name}
        times = {"entered": entered, "agreed": agreed, "done": self.now}
        self.calls.append(key | times)

    def report(self, *, last: bool = False) -> TimeReport:
        found = self.spent.report(last=last)
        assert found is not None
        return found


@pytest.fixture
def process() -> Process:
    return Process()


def test_nothing_is_reported_before_the_process_is_a_member() -> None:
    assert TimeSpent().report() is None


def test_the_start_ends_with_the_first_call_that_is_repeated(process: Process) -> None:
    process.run(2)
    process.call(name="parameters")  # 0.1 s
    assert not process.report().trains
    process.run(1)
    process.call(waits=0.5)
    process.run(1)
    assert process.report().start == pytest.approx(4.7)  # still all of the time
    process.call(waits=0.25)
    found = process.report()
    assert found.trains and found.start == pytest.approx(2 + 0.1 + 1 + 0.5)
    assert found.waiting == pytest.approx(0.25)


def test_names_with_the_number_of_the_step_are_repetitions(process: Process) -> None:
    process.run(1)
    for step in range(3):
        process.run(1)
        process.call(waits=0.25, name=f"noname.{step}")
    assert not process.report().trains  # they may be parameters
    found = process.report(last=True)
    assert found.trains and found.start == pytest.approx(2.25)
    assert found.waiting == pytest.approx(0.5)


def test_many_calls_without_a_repetition_are_steps(process: Process) -> None:
    for step in range(RECORDER_CAPACITY - 1):
        process.call(name=f"noname.{step}")
    assert not process.report().trains
    process.call(name="noname.last")
    assert process.report().trains


def test_compilations_count_once_and_not_as_start(process: Process) -> None:
    process.run(1)
    process.spent.ended("compile", 0.5)  # inside of the next one
    process.run(1)
    process.spent.ended("compile", 2.0)
    process.run(1)
    process.call()
    process.call()
    process.run(3)
    process.spent.ended("compile", 3.0)
    found = process.report()
    assert (found.start, found.compile) == pytest.approx((1.0, 2.0))
    assert found.recompile == pytest.approx(3.0)


def test_a_block_contains_what_happens_inside(process: Process) -> None:
    process.call()
    process.call()
    with process.spent.on("checkpoints"):
        with process.spent.on("other"):
            process.run(1)
        process.spent.ended("compile", 1.0)
        process.call(waits=2)
    process.call(waits=0.5)
    found = process.report()
    assert found.checkpoints == pytest.approx(1 + 2 + 0.1)
    assert (found.other, found.recompile) == (0, 0)
    assert found.waiting == pytest.approx(0.5)


def test_a_block_before_the_first_step_is_no_start(process: Process) -> None:
    with process.spent.on("checkpoints"):
        process.call(waits=2, name="barrier")
    process.run(1)
    process.call()
    process.call(waits=0.5)
    found = process.report()
    assert found.checkpoints == pytest.approx(2.1)
    assert found.start == pytest.approx(1)
    assert found.waiting == pytest.approx(0.5)


def test_a_block_may_contain_the_first_step(process: Process) -> None:
    """The waits inside of the block belong to it, before and after the first step."""
    process.run(1)
    with process.spent.on("compile"):
        process.run(2)
        process.call(waits=0.5)
        process.run(3)
        process.call(waits=1)
        assert not process.report().trains  # where the block ends is not known yet
    process.call(waits=0.25)
    found = process.report()
    assert found.start == pytest.approx(1)
    assert found.compile == pytest.approx(2.5)
    assert found.recompile == pytest.approx(0.1 + 3 + 1 + 0.1)
    assert found.waiting == pytest.approx(0.25)


def test_the_wait_of_a_call_that_a_loss_has_stopped_is_a_loss(process: Process) -> None:
    process.call()
    process.call(waits=0.25)
    began = process.now
    process.run(1.5)  # the call below waits for a dead rank
    process.spent.begin_loss()
    process.run(0.5)
    process.spent.end_loss()
    assert process.report().losses == 0  # the call has not ended yet
    process.now = began
    process.call(waits=2.25)
    process.call(waits=0.5)
    found = process.report()
    assert found.losses == pytest.approx(2.25)
    assert found.waiting == pytest.approx(0.25 + 0.5)


def test_only_progress_since_a_commit_is_repeated(process: Process) -> None:
    process.call()
    process.call()
    process.spent.commit()
    process.run(3)
    process.call(waits=1)  # 0.1 s of it are progress
    with process.spent.on("checkpoints"):
        process.run(5)
    process.spent.repeat()
    process.spent.repeat()  # nothing was committed since the last error
    assert process.report().repeated == pytest.approx(3 + 0.1)


def test_the_last_report_has_the_time_since_the_last_call(process: Process) -> None:
    process.call()
    process.call()
    process.run(2)
    with process.spent.on("checkpoints"):
        process.run(3)
    assert process.report().end == 0
    found = process.report(last=True)
    assert found.end == pytest.approx(2) and found.last


def test_a_new_count_begins_with_a_new_membership(process: Process) -> None:
    process.call()
    process.call(waits=3)
    with process.spent.on("losses"):
        process.run(1)
        process.spent.begin(process)  # type: ignore[arg-type]
        process.run(2)
    found = process.report()
    assert found.age == pytest.approx(2) and found.losses == pytest.approx(2)
    assert found.waiting == 0 and not found.trains


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="part='data': expected .*compile"):
        ringjax.time_for("data")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step=-1"):
        ringjax.progress(-1, 10)
    with pytest.raises(ValueError, match="total=0"):
        ringjax.progress(0, 0)
