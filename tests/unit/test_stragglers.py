"""Tests of the straggler detection with simulated waits."""

from __future__ import annotations

import random

import pytest

from ringjax.monitor.stragglers import (
    MAX_PENDING_CALLS,
    MIN_CALLS,
    LastArrival,
    Stragglers,
    StragglerTally,
)


def _simulate(
    size: int, calls: int, late: dict[int, int], noise: int = 50
) -> StragglerTally:
    """Simulates calls of ranks that are 0 to `noise` microseconds late, plus `late`."""
    seen, tally, rng = Stragglers(size), StragglerTally(size), random.Random(7)
    for call in range(calls):
        came = [rng.randrange(noise) + late.get(rank, 0) for rank in range(size)]
        for rank in rng.sample(range(size), size):
            for judged in seen.add_waits(rank, [(0, call, max(came) - came[rank])]):
                tally.add(judged)
    return tally


@pytest.mark.parametrize("size", [2, 3, 5, 64])
def test_the_late_rank_is_named(size: int) -> None:
    late = size - 1
    seen = _simulate(size, 100, {late: 3000})
    assert seen.calls == 100
    assert seen.straggler(elapsed=100 * 0.03) == late
    assert len(seen.delays[late]) == 100
    assert 0.0028 < seen.typical_delay(late) < 0.0031


@pytest.mark.parametrize("size", [2, 3, 5, 64])
def test_no_rank_is_named_among_equal_ranks(size: int) -> None:
    assert _simulate(size, 1000, {}).straggler(elapsed=1000 * 0.03) is None


def test_a_rank_that_is_last_by_a_tiny_delay_is_not_named() -> None:
    assert _simulate(4, 1000, {2: 60}).straggler(elapsed=1000 * 0.03) is None


@pytest.mark.parametrize("size", [2, 3, 8])
def test_no_rank_is_named_if_delays_are_random(size: int) -> None:
    assert _simulate(size, 1000, {}, noise=9000).straggler(elapsed=1000 * 0.03) is None


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_is_late_for_the_first_of_many_calls_is_named(size: int) -> None:
    tally, rng = StragglerTally(size), random.Random(7)
    for call in range(1000):
        if call % 20:
            tally.add(LastArrival(rng.randrange(size), rng.random() * 0.0003))
        else:
            tally.add(LastArrival(1, 0.004))
    assert tally.straggler(elapsed=50 * 0.05) == 1


def test_a_rank_that_is_late_once_is_not_named() -> None:
    tally, rng = StragglerTally(4), random.Random(7)
    for call in range(1000):
        last, behind = (2, 2.0) if call == 500 else (rng.randrange(4), 0.0001)
        tally.add(LastArrival(last, behind))
    assert tally.straggler(elapsed=1000 * 0.03) is None


def test_few_calls_name_no_rank() -> None:
    assert _simulate(2, MIN_CALLS - 1, {1: 10**6}).straggler(elapsed=1.0) is None


def test_the_shortest_wait_of_a_call_counts() -> None:
    seen = Stragglers(2)
    assert seen.add_waits(0, [(1, 1, 9000), (1, 1, 5000)]) == []
    assert seen.add_waits(1, [(1, 1, 4000), (1, 1, 10)]) == [LastArrival(1, 0.00499)]


def test_calls_of_different_lanes_are_separate() -> None:
    seen = Stragglers(2)
    assert seen.add_waits(0, [(1, 1, 5)]) == []
    assert seen.add_waits(1, [(0, 1, 5)]) == []


def test_calls_that_a_rank_never_reports_are_forgotten() -> None:
    seen = Stragglers(2)
    seen.add_waits(0, [(0, call, 1) for call in range(3 * MAX_PENDING_CALLS)])
    assert seen.add_waits(1, [(0, 0, 1)]) == []  # call 0 is forgotten
    assert len(seen.add_waits(1, [(0, 3 * MAX_PENDING_CALLS - 1, 1)])) == 1
