"""Elastic jobs in simulated time: fifty thousand seeds, and rules that are wrong.

The simulation is tests/simulation/job.py; run it by hand for more seeds.
"""

from __future__ import annotations

import pytest
from simulation import __main__ as command
from simulation import job
from simulation.call import Violation
from simulation.wrong_rules import WRONG

SEEDS, SLICES = 50_000, 10


@pytest.mark.timeout(120)
@pytest.mark.parametrize("piece", range(SLICES))
def test_the_invariants_hold(piece: int) -> None:
    count = SEEDS // SLICES
    for seed in range(piece * count, (piece + 1) * count):
        job.run(seed)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("group", [2, 3])
def test_the_invariants_hold_with_groups(group: int) -> None:
    for seed in range(SEEDS // SLICES):
        job.run(seed, group=group)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rules_are_caught(wrong: str) -> None:
    """Otherwise the test above would prove nothing."""
    with pytest.raises(Violation):
        for seed in range(3000):
            job.run(seed, wrong, group=2 if wrong == "own ending" else 1)


def test_a_seed_tells_all() -> None:
    first, again = job.run(7), job.run(7)
    assert (first.counter, first.now) == (again.counter, again.now)
    logs = [{n: w.log for n, w in s.workers.items()} for s in (first, again)]
    assert logs[0] == logs[1]


def test_the_command_prints_the_seeds_that_fail(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["--seeds", "0", "20"]) == 0
    assert "20 seeds, 0 failed" in capsys.readouterr().out
    assert command.main(["--seeds", "0", "600", "--wrong", "naive"]) == 1
    assert "seed " in capsys.readouterr().out
