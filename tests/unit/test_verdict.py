"""Whom ringrun blames when several ranks fail within a moment."""

from __future__ import annotations

import pytest

from ringjax.run.verdict import Blame, Verdict


def verdict(size: int = 3, words: dict[int, str] | None = None) -> Verdict:
    return Verdict(["localhost"] * size, lambda rank: (words or {}).get(rank, ""))


def test_nobody_to_blame() -> None:
    found = verdict(2)
    found.exited(0, 0, 1.0)
    assert not found.over
    found.exited(1, 0, 2.0)
    assert (found.over, found.failed) == (True, False)
    assert found.first() is None


def test_the_first_to_exit() -> None:
    found = verdict()
    found.exited(2, 7, 1.0)
    found.exited(0, 3, 1.1)
    assert found.first() == Blame(2, 7, "rank 2 failed with exit code 7")


def test_last_words_explain_an_exit_code() -> None:
    found = verdict(words={1: "ValueError: boom"})
    found.exited(1, 1, 1.0)
    expected = "rank 1 failed: ValueError: boom (exit code 1)"
    assert found.first() == Blame(1, 1, expected)


def test_a_report_counts_from_when_it_came() -> None:
    # Rank 1 raised; rank 0 heard of it and was quicker to leave.
    found = verdict()
    found.reported(1, "ValueError: boom", 1.0)
    found.exited(0, 1, 1.1)
    found.exited(1, 1, 1.5)
    blame = found.first()
    assert blame is not None
    assert (blame.rank, blame.exit_code) == (1, 1)
    assert "ValueError: boom" in blame.reason


@pytest.mark.parametrize(
    "text",
    [
        "PeerLost: rank 1 (host) closed its connection",
        "ringjax.errors.PeerLost: rank 1 failed",
        "jax.errors.JaxRuntimeError: UNAVAILABLE: RINGJAX[world, epoch 0]: rank 1 …",
    ],
)
def test_losing_a_peer_is_a_consequence(text: str) -> None:
    # The news of the survivor overtook the exit of the one that was killed.
    found = verdict(words={0: text})
    found.exited(0, 1, 1.0)
    found.exited(1, 137, 1.2)
    expected = "rank 1 was killed by signal 9 (SIGKILL)"
    assert found.first() == Blame(1, 137, expected)


def test_what_we_kill_is_not_to_blame() -> None:
    found = verdict()
    found.exited(2, 5, 1.0)
    found.stopping()
    found.exited(0, 143, 0.5)
    found.exited(1, 137, 0.6)
    blame = found.first()
    assert blame is not None
    assert blame.rank == 2


def test_a_rank_that_reported_and_then_hung() -> None:
    found = verdict()
    found.reported(1, "ValueError: boom\nmore", 0.5)
    found.exited(0, 1, 1.0)
    found.stopping()
    found.exited(1, 137, 3.0)
    assert found.first() == Blame(1, 1, "rank 1 failed: ValueError: boom")


def test_a_crash_keeps_its_last_words() -> None:
    found = verdict(words={0: "Fatal Python error: Segmentation fault"})
    found.exited(0, 139, 1.0)
    expected = (
        "rank 0 failed: Fatal Python error: Segmentation fault "
        "(killed by signal 11 (SIGSEGV))"
    )
    assert found.first() == Blame(0, 139, expected)


def test_hosts_are_named_if_there_are_several() -> None:
    found = Verdict(["a", "b"], lambda rank: "")
    found.exited(1, 255, 1.0, "lost its host, ssh ended (255)")
    expected = "rank 1 (b): lost its host, ssh ended (255)"
    assert found.first() == Blame(1, 255, expected)
