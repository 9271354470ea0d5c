"""Tests of benchmarks/memory.py without ranks: extra memory, growth, tables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from support.launch import ROOT, environment

from benchmarks import memory
from benchmarks.harness import jobs, memory_rank

MIB = memory.MIB


def level(private: int, shared: int = 0, file: int = 0, mapped: int = 0) -> Any:
    """Returns the memory of a rank in bytes, from values in MiB."""
    values = {"private": private, "shared": shared, "file": file, "mapped": mapped}
    return {name: value * MIB for name, value in values.items()}


def rank(**more: Any) -> dict[str, Any]:
    """Returns the result of a rank with 100 MiB of gradients."""
    return {
        "before": level(200),
        "world": level(203, 2, 1, 8),
        "program": level(210, 2, 1, 8),
        "steady": level(215, 4, 1, 8),
        "peak": 225 * MIB,
        "gradients": 100 * MIB,
        **more,
    }


def test_extra_excludes_results_and_compilation() -> None:
    found = {n: v / MIB for n, v in memory.extra(rank(), donated=True).items()}
    assert found == {
        "world": 6,
        "program": 7,
        "results": 0,
        "private": 8,
        "shared": 4,
        "mapped": 8,
        "steady": 13,
        "extra": 18,  # for a moment of a step
    }


def test_results_are_not_extra_without_donation() -> None:
    more = rank(steady=level(315, 4, 1, 8), peak=None)
    found = memory.extra(more, donated=False)
    assert found["results"] == 100 * MIB
    assert found["extra"] == found["steady"] == 13 * MIB


def series(per_step: float, jump: int = 0) -> list[dict[str, Any]]:
    """Returns the memory of 10,000 steps, with a `jump` after the first step."""
    rest = {"descriptors": 9, "threads": 5, "maps": 100}
    return [
        {"step": n, "bytes": 1e8 + per_step * n + (jump if n else 0), **rest}
        for n in range(0, 10_001, 100)
    ]


def test_growth_ignores_a_jump() -> None:
    assert memory.growth(series(0, jump=50 * MIB))["bytes"] == pytest.approx(0)
    assert memory.growth(series(300))["bytes"] == pytest.approx(3_000_000)
    assert memory.growth(series(300))["threads"] == 0
    assert memory.slope([1, 1], [2, 3]) == 0  # a single place has no slope


def test_tables_mark_values_above_their_limit() -> None:
    about = {"set": "vgg16", "variant": "not donated", "ranks": 2, "steps": 10_000}
    about |= {"gradients": 528 * MIB}
    few, many = (memory.extra(rank(peak=p * MIB), True) for p in (225, 999))
    rows = [
        {**about, "worst": many, "variant": "nothing, not donated"},
        {**about, "worst": many, "variant": "nothing, donated", "ranks": 4},
        {**about, "worst": many},
        {**about, "worst": few},
        {**about, "worst": many, "variant": "in place, donated"},
    ]
    rows = [{**row, "alone": memory.alone(row, rows)} for row in rows]
    _, *lines = (re.split(r" {2,}", x) for x in memory.extra_table(rows).splitlines())
    # The third takes no more than the first one, which is not ours.
    much = [line[-1] == "more than 64" for line in lines]
    assert much == [False, False, False, False, True]
    ends = [line[10:12] for line in lines]
    assert ends[3] == [f"{v['extra'] / MIB:.1f}" for v in (few, many)]
    assert ends[4] == [f"{many['extra'] / MIB:.1f}", "-"]
    for per_step, marked in ((10, False), (300, True)):
        worst = memory.worst([memory.growth(series(n)) for n in (0, per_step)])
        _, line = memory.growth_table([{**about, "worst": worst}]).splitlines()
        assert line.endswith("grows: bytes") == marked
        assert re.split(r" {2,}", line)[3] == f"{per_step * 10_000 / 1024:.1f}"


def test_every_variant_is_measured() -> None:
    found = memory.cases(memory.parse(["-np", "3", "--sets", "vgg16"]))
    assert {case["ranks"] for case in found} == {3}
    kept = [(c["set"], c["variant"]) for c in found if not c["steps"]]
    assert kept == [("vgg16", v) for v in memory_rank.VARIANTS]
    grown = [(c["set"], c["variant"]) for c in found if c["steps"] == 10_000]
    assert grown == [("resnet50", v) for v in memory_rank.VARIANTS]
    assert not any(c["steps"] for c in memory.cases(memory.parse(["--steps", "0"])))


@pytest.mark.parametrize("words", [["--steps", "7"], ["--shrink", "-1"], ["-np", "1"]])
def test_bad_options_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        memory.parse(words)


def test_resident_memory_of_this_process() -> None:
    import mmap

    before, size = memory_rank.resident(), 16 * MIB
    own, shared = bytearray(size), mmap.mmap(-1, 2 * size)
    own[:: mmap.PAGESIZE] = b"x" * len(own[:: mmap.PAGESIZE])
    shared[:size] = bytes(size)
    after = memory_rank.resident()
    shared.close()
    assert size / 2 < after["private"] - before["private"] < 2 * size
    assert after["shared"] - before["shared"] == size
    assert after["mapped"] - before["mapped"] == 2 * size
    assert memory_rank.counts()["threads"] >= 1


def test_a_process_that_does_not_grow() -> None:
    plan = {
        "set": "vgg16",
        "variant": "nothing, donated",
        "steps": 100,
        "shrink": 1 << 16,
    }
    words = [sys.executable, "-m", "benchmarks.harness.memory_rank", json.dumps(plan)]
    env = environment("memory", {"PYTHONPATH": str(ROOT), "RINGJAX_RANK": "3"})
    text = subprocess.check_output(words, env=env, timeout=50, text=True)
    (found,) = jobs.reports(text)
    assert found["gradients"] < MIB
    assert [row["step"] for row in found["series"]] == list(range(101))
    assert memory.growth(found["series"])["descriptors"] == 0
