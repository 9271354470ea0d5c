"""Tests of the jobs of `chaos.same_bits`: what they cover, and what they find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chaos.cells import MODELS, SHARES, SWEEP_STEPS, TRANSPORTS, draw, run_sweep
from chaos.faults import check

from ringjax import failpoints

RIGHT, WRONG = "0" * 64, "1" * 64


def test_fifty_seeds_cover_everything() -> None:
    cells = [draw(seed, list(TRANSPORTS)) for seed in range(50)]
    assert {(c.transport, c.model) for c in cells} == {
        (transport, model) for transport in TRANSPORTS for model in MODELS
    }
    assert {c.shares for c in cells} == set(SHARES)
    assert {c.ranks for c in cells} == {2, 3, 5, 7}
    for cell in cells:
        points = failpoints.parse(cell.failpoints)
        deadly = {p.target for p in points if p.action == "kill"}
        assert cell.survivor not in deadly and cell.survivor != cell.fails
    assert draw(7, list(TRANSPORTS)) == cells[7]


class Reference:
    """A stand-in for the training in one process."""

    def after(self, steps: int) -> str:
        return RIGHT

    def step(self, workers: list[int]) -> str:
        return RIGHT


class Job:
    """A job of two ranks that prints given lines."""

    def __init__(self, second: list[str]) -> None:
        self._lines = [lines(), second]

    def wait(self, timeout: float) -> int:
        return 0

    def output(self, rank: int) -> str:
        return "\n".join(self._lines[rank])


def lines() -> list[str]:
    return [f"nnx {shares} {SWEEP_STEPS} {RIGHT}" for shares in SHARES]


def sweep(second: list[str]) -> str:
    references: Any = {"nnx": Reference()}
    return run_sweep(2, "tcp", ["nnx"], references, lambda *_, **__: Job(second))


def test_a_sweep_names_digests_that_differ_or_are_missing() -> None:
    assert sweep(lines()) == "4 digests on each rank"
    wrong = [*lines()[:3], lines()[3].replace(RIGHT, WRONG)]
    for second in (wrong, lines()[:3]):
        with pytest.raises(AssertionError, match="rank 1: nnx random"):
            sweep(second)


def test_a_step_that_differs_from_the_given_training_is_found(tmp_path: Path) -> None:
    line = '{"t": 1, "step": 0, "workers": [0], "digest": "%s", "epoch": 0}\n'
    (tmp_path / "0.jsonl").write_text(line % RIGHT)
    assert check(tmp_path, replay=Reference()).steps == 1
    (tmp_path / "0.jsonl").write_text(line % WRONG)
    with pytest.raises(AssertionError, match="not those of one process"):
        check(tmp_path, replay=Reference())
