"""Tests of benchmarks/by_ranks.py without ranks: the results that are plotted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import by_ranks, collectives


def row(peer: str, ranks: int, *medians: float, case: str = "alltoall, 4 KiB") -> Any:
    """Returns a row of `turns.measure` with the columns that by_ranks reads."""
    rounds = [[us, us] for us in medians]
    return {"peer": peer, "ranks": ranks, "case": case, "rounds_us": rounds}


def test_times_are_of_ringjax_and_the_best_of_the_limit() -> None:
    rows = [
        row("limit", 2, 3.0, 3.0, 3.0),
        row("limit", 2, 2.0, 4.0, 5.0),
        row("ringjax", 2, 6.0, 7.12345, 9.0),
        row("ringjax", 16, 70.0),
        row("limit", 2, 1.0, case="broadcast, 4 KiB"),  # ringjax has failed there
    ]
    assert by_ranks.times(rows) == [
        {
            "collective": "alltoall",
            "size": "4 KiB",
            "ranks": 2,
            "us": 7.123,
            "limit_us": 4.0,
        },
        {"collective": "alltoall", "size": "4 KiB", "ranks": 16, "us": 70.0},
    ]


def test_options_are_those_of_collectives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def run(options: Any, *_: Any) -> tuple[list[Any], bool]:
        asked.append(options)
        found = row("ringjax", 2, 5.0) | {"share": None, "foreign": None}
        return [found], True

    def job(ranks: int, timeout: float) -> dict[str, Any]:
        numbers = {"init s": 0.1, "init MiB/rank": 0.25, "shared MiB": 33.333}
        return {"ranks": ranks, **numbers, "descriptors": 30, "end s": 1.0}

    monkeypatch.setattr(by_ranks.session, "run", run)
    monkeypatch.setattr(by_ranks.many_ranks, "job", job)
    monkeypatch.setattr(by_ranks, "DATA", tmp_path / "ranks.json")
    by_ranks.main(["-np", "2,5", "--rounds", "7"])
    (options,) = asked
    assert (options.ranks, options.rounds) == ([2, 5], 7)
    assert options.sizes == [4096, 1 << 20, 16 << 20]
    assert options.collectives == collectives.COLLECTIVES
    data = json.loads((tmp_path / "ranks.json").read_text())
    assert [point["us"] for point in data["times"]] == [5.0]
    assert [m["ranks"] for m in data["memory"]] == [2, 5]
    assert data["memory"][0]["shared MiB"] == 33.33
    assert "alltoall, 4 KiB" in capsys.readouterr().out
