"""Tests of commit decisions. The doctests of commit_decision.py cover most cases."""

from __future__ import annotations

import pytest

from ringjax.membership.commit_decision import (
    CommitReport,
    all_sets,
    decide,
    rank_to_give_up,
)


@pytest.mark.parametrize(
    ("accusations", "lost"),
    [
        ([(1, 0)], 0),
        ([(0, 1), (1, 0)], 1),
        ([(0, 2), (1, 2), (2, 0), (2, 1)], 2),
        ([(0, 1), (0, 2), (0, 3)], 0),  # rank 0 reaches no other rank
        ([], None),
    ],
)
def test_the_rank_to_give_up(
    accusations: list[tuple[int, int]], lost: int | None
) -> None:
    assert rank_to_give_up(accusations) == lost


@pytest.mark.parametrize("restart", [False, True])
def test_committed_and_started_calls(restart: bool) -> None:
    survivors = [
        CommitReport({"0": (5, 6, True), "7": (0, 0, True)}),
        CommitReport({"0": (5, 7, False)}),
    ]
    lost = CommitReport({"0": (6, 6, True), "9": (3, 3, True)})
    assert decide(survivors, [lost], restart) == {
        "0": (6, False),
        "7": (0, not restart),
    }
    without = {"0": (5 if restart else 6, False), "7": (0, not restart)}
    assert decide(survivors, [], restart) == without


def test_a_process_set_without_ranks_is_kept() -> None:
    reports = [
        CommitReport(sets={"2": (1,), "10": (0, 1)}, next_set=11),
        CommitReport(),
    ]
    assert all_sets(reports, {0: 0, 2: 1}) == ({"2": [], "10": [0]}, 11)
