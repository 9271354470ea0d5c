"""Tests of the cause of a failure, if several workers fail at nearly the same time."""

from __future__ import annotations

import pytest

from ringjax.run.outcome import JobOutcome
from ringjax.run.workers import WorkerSlot, WorkerTable


class Ranks:
    """The worker table of a static job. `words` is the last output of each rank."""

    def __init__(self, *hosts: str, words: dict[int, str] | None = None) -> None:
        self.table = WorkerTable(
            len(hosts), lambda rank: (words or {}).get(rank, ""), elastic=False
        )
        for rank, host in enumerate(hosts):
            self.table.add(WorkerSlot(host, 0, rank))

    def exited(self, rank: int, code: int, now: float, text: str = "") -> None:
        self.table.record_end(self.table.workers[rank], code, text, now)

    def reported(self, rank: int, text: str, now: float) -> None:
        self.table.record_event("failure", rank, text, now)

    def outcome(self) -> JobOutcome:
        return self.table.outcome({})


def ranks(size: int = 3, words: dict[int, str] | None = None) -> Ranks:
    return Ranks(*["localhost"] * size, words=words)


def blamed(rank: int, code: int, why: str) -> JobOutcome:
    return JobOutcome(code, rank, why, {rank: b""})


def test_success_has_no_culprit() -> None:
    found = ranks(2)
    found.exited(0, 0, 1.0)
    assert found.table.running() and not found.table.has_succeeded()
    found.exited(1, 0, 2.0)
    assert not found.table.running() and not found.table.failed()
    assert found.outcome() == JobOutcome(0, results={0: b"", 1: b""})


def test_the_first_exit_is_the_cause() -> None:
    found = ranks()
    found.exited(2, 7, 1.0)
    found.exited(0, 3, 1.1)
    assert found.outcome() == blamed(2, 7, "rank 2 failed with exit code 7")


def test_the_last_output_explains_an_exit_code() -> None:
    found = ranks(words={1: "ValueError: boom"})
    found.exited(1, 1, 1.0)
    expected = "rank 1 failed: ValueError: boom (exit code 1)"
    assert found.outcome() == blamed(1, 1, expected)


@pytest.mark.parametrize("elastic", [False, True])
def test_a_report_counts_from_its_arrival(elastic: bool) -> None:
    # Rank 1 raised an error; rank 0 noticed it and exited earlier.
    found = ranks()
    found.table._elastic = elastic
    found.reported(1, "ValueError: boom", 1.0)
    found.exited(0, 1, 1.1)
    found.exited(1, 1, 1.5)
    outcome = found.outcome()
    assert (outcome.rank, outcome.exit_code) == (1, 1)
    assert "ValueError: boom" in outcome.reason


@pytest.mark.parametrize(
    "text",
    [
        "PeerLost: rank 1 (host) closed its connection",
        "ringjax.errors.PeerLost: rank 1 failed",
        "jax.errors.JaxRuntimeError: UNAVAILABLE: RINGJAX[world, epoch 0]: rank 1 …",
    ],
)
def test_a_lost_peer_is_not_the_cause(text: str) -> None:
    # The report of the survivor came before the exit of the killed rank.
    found = ranks(words={0: text})
    found.exited(0, 1, 1.0)
    found.exited(1, 137, 1.2)
    expected = "rank 1 was killed by signal 9 (SIGKILL)"
    assert found.outcome() == blamed(1, 137, expected)


@pytest.mark.parametrize(("elastic", "rank"), [(False, 1), (True, 0)])
def test_a_crash_after_a_loss(elastic: bool, rank: int) -> None:
    # In a static job, rank 0 crashed because it lost rank 1. In an elastic job it had
    # continued after the loss, so its crash is the cause.
    found = ranks(words={0: "PeerLost: rank 1 closed its connection"})
    found.table._elastic = elastic
    found.exited(0, 134, 1.0)
    found.exited(1, 1, 1.2)
    assert found.outcome().rank == rank


def test_a_rank_that_ringrun_kills_is_not_the_cause() -> None:
    found = ranks()
    found.exited(2, 5, 1.0)
    found.table.stopping = True
    found.exited(0, 143, 0.5)
    found.exited(1, 137, 0.6)
    assert found.outcome().rank == 2


def test_a_rank_that_reported_and_then_hung() -> None:
    found = ranks()
    found.reported(1, "ValueError: boom\nmore", 0.5)
    found.exited(0, 1, 1.0)
    found.table.stopping = True
    found.exited(1, 137, 3.0)
    assert found.outcome() == blamed(1, 1, "rank 1 failed: ValueError: boom")


def test_a_crash_keeps_its_last_output() -> None:
    found = ranks(words={0: "Fatal Python error: Segmentation fault"})
    found.exited(0, 139, 1.0)
    expected = (
        "rank 0 failed: Fatal Python error: Segmentation fault "
        "(killed by signal 11 (SIGSEGV))"
    )
    assert found.outcome() == blamed(0, 139, expected)


def test_several_hosts_are_named() -> None:
    found = Ranks("a", "b")
    found.exited(1, 255, 1.0, "lost its host, ssh ended (255)")
    expected = "rank 1 (b): lost its host, ssh ended (255)"
    assert found.outcome() == blamed(1, 255, expected)
