"""Tests that the chaos tests' checker accepts correct traces and finds mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.faults import Fault, check, quantile
from chaos.model import Replay

# Worker 2 dies in step 3, and worker 4 joins in step 6.
HISTORY = [[0, 1, 2]] * 3 + [[0, 1]] * 3 + [[0, 1, 4]] * 3
Traces = dict[int, list[dict[str, Any]]]


def _traces() -> Traces:
    replay, traces = Replay(), Traces()
    for step, who in enumerate(HISTORY):
        digest = replay.step(who)
        for worker in who:
            line = {"t": step * 1.0, "step": step, "workers": who, "digest": digest}
            traces.setdefault(worker, []).append({**line, "epoch": 0, "size": len(who)})
    return traces


def _check(folder: Path, traces: Traces) -> Any:
    for worker, trace in traces.items():
        text = "".join(json.dumps(line) + "\n" for line in trace)
        (folder / f"{worker}.jsonl").write_text(text)
    return check(folder, [Fault(2.5, "kill", 2)])


def test_correct_traces_are_accepted(tmp_path: Path) -> None:
    traces = _traces()
    traces[0].insert(0, {"t": 0, "event": "started"})
    result = _check(tmp_path, traces)
    assert result.steps == len(HISTORY)
    assert (result.smallest, result.largest) == (2, 3)
    assert result.recoveries == [0.5, 0.5]
    assert result.pauses == [1.0]


def test_a_partial_line_means_a_killed_worker(tmp_path: Path) -> None:
    traces = _traces()
    _check(tmp_path, traces)
    with (tmp_path / "2.jsonl").open("a") as file:
        file.write('{"t": 3.0, "ste')
    assert check(tmp_path).steps == len(HISTORY)


def _forget_step(traces: Traces) -> None:
    for worker in (0, 1):
        del traces[worker][4]


def _end_early_and_late(traces: Traces) -> None:
    for worker in (0, 1):
        del traces[worker][:2]
    del traces[2][1]


def _repeat(traces: Traces) -> None:
    traces[1].insert(4, traces[1][4])


def _differ(traces: Traces) -> None:
    traces[1][4]["digest"] = "0123"


def _add_others(traces: Traces) -> None:
    traces[1][4]["workers"] = [0, 1, 2]


def _all_with_the_dead(traces: Traces) -> None:
    for worker in (0, 1):
        traces[worker][3]["workers"] = [0, 1, 2]


def _stranger(traces: Traces) -> None:
    traces[7] = [dict(line) for line in traces[0]]


def _back(traces: Traces) -> None:
    traces[0][2]["epoch"] = 5


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (_forget_step, "step 5 after step 3"),
        (_end_early_and_late, "step 2 after step 0"),
        (_repeat, "step 4 after step 4"),
        (_differ, "parameters differ"),
        (_add_others, "ranks summed workers"),
        (_all_with_the_dead, "not those of one process"),
        (_stranger, "not in its own sum"),
        (_back, "worker 0"),
    ],
)
def test_mistakes_in_traces_are_found(
    tmp_path: Path, wrong: Callable[[Traces], None], found: str
) -> None:
    traces = _traces()
    wrong(traces)
    with pytest.raises(AssertionError, match=found):
        _check(tmp_path, traces)


def test_quantiles() -> None:
    samples = [float(n) for n in range(100)]
    assert [quantile(samples, q) for q in (0.5, 0.99, 1.0)] == [50.0, 99.0, 99.0]
    assert quantile([], 0.5) == 0.0
