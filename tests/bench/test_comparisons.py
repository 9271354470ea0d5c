"""Runs the comparisons in benchmarks/ as programs, on two and three ranks of ringjax.

No test checks a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launch import ROOT, environment

PROGRAMS = (
    *("allreduce", "by_ranks", "collectives", "memory", "output", "stragglers"),
    *("training", "elastic.losses", "elastic.strangers", "gpu.check"),
    *("hosts.collectives", "hosts.fabric", "hosts.many_ranks"),
)


def compared(program: str, *words: str, file: Path) -> tuple[str, list[dict[str, Any]]]:
    """Returns the output of a comparison of ringjax alone, and its rows."""
    words = ("--peers", "ringjax", *words, "--json", str(file))
    done = subprocess.run(
        [sys.executable, "-m", program, *words],
        cwd=ROOT,
        env=environment("", {}),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text())["rows"]


def test_the_comparison_runs(tmp_path: Path) -> None:
    short = ["--rounds", "1", "--seconds", "0.01", "--sizes", "4096", "--no-model"]
    text, rows = compared("benchmarks.allreduce", *short, file=tmp_path / "rows.json")
    assert "4 KiB, float32, sum" in text
    assert [row["variant"] for row in rows] == [
        "jit",
        "jit, donated",
        "allreduce_grads in jit, donated",
        "core, numpy in place",
    ]
    assert rows[0]["ratio"] == 1.0 and len(rows[0]["rounds_us"]) == 1


def test_the_comparison_of_all_collectives_runs(tmp_path: Path) -> None:
    words = ["--quick", "-np", "3", "--rounds", "1"]  # these override --quick
    file = tmp_path / "rows.json"
    text, rows = compared("benchmarks.collectives", *words, file=file)
    names = ["allreduce", "broadcast", "allgather", "alltoall", "reducescatter"]
    found = [(row["collective"], row["tensors"], row["size"]) for row in rows]
    # Sizes are rounded so that each of three ranks has a whole number of elements.
    assert found == [(name, 1, size) for name in names for size in (4092, 1048572)]
    assert all(row["ranks"] == 3 and len(row["rounds_us"]) == 1 for row in rows)
    *_, head, first = text[: text.index("allreduce, 1 MiB  ")].splitlines()
    assert head.split() == ["us", "(min", "..", "max)", "ringjax", "foreign"]
    assert first.startswith("allreduce, 4 KiB  ")


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_can_be_started_from_the_checkout(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
