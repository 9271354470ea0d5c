"""ringjax.bench on real worlds, and the comparison in benchmarks/ with ringjax alone.

No test looks at how long something took.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launch import ROOT, StartJob, environment
from support.rank_worker import World

pytestmark = pytest.mark.launch("collectives")
THREE = pytest.mark.ranks(3)
QUICK = ["-n", "2", "-w", "1"]
ALONE_TOO = ("allreduce", "barrier")


@THREE
@pytest.mark.parametrize("mode", ["--jit", "--eager"])
@pytest.mark.parametrize(
    "collective",
    [
        *("allgather", "broadcast", "reducescatter", "alltoall"),
        *(pytest.param(c, marks=pytest.mark.ranks(1, 3)) for c in ALONE_TOO),
    ],
)
def test_every_collective_is_checked_and_timed(
    world: World, collective: str, mode: str
) -> None:
    from ringjax import bench

    options = bench.parse([collective, mode, *QUICK])
    row = bench.Bench(options).row(4096)
    share = 4096 // 4 // world.size * world.size
    assert row["count"] == (0 if collective == "barrier" else share)
    assert row["size"] == 4 * row["count"]
    assert 0 < row["min"] <= row["median"]
    assert row["p99"] > 0 and row["spread"] >= 0
    if collective == "barrier":
        assert row["busbw"] is row["limit"] is None
        return
    assert (row["limit"] > 0) == (world.size > 1)
    factor = bench.bus_factor(collective, world.size)
    assert row["busbw"] == pytest.approx(row["algbw"] * factor)


@THREE
@pytest.mark.parametrize("dtype", ["f16", "bf16", "i32", "u8"])
@pytest.mark.parametrize("op", ["Average", "Product", "Min"])
def test_reductions_of_other_types(world: World, dtype: str, op: str) -> None:
    from ringjax import bench

    words = ["reducescatter", "--dtype", dtype, "--op", op, *QUICK]
    assert bench.Bench(bench.parse(words)).row(1000)["dtype"] == dtype


@THREE
def test_a_wrong_result_ends_the_benchmark(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringjax import bench, collectives

    monkeypatch.setattr(collectives, "allreduce", lambda x, op: x)
    with pytest.raises(ArithmeticError, match=f"rank {world.rank}: allreduce of 64 B"):
        bench.Bench(bench.parse(["allreduce", *QUICK])).row(64)


def test_as_a_program(start_job: StartJob, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["-b", "1K", "-e", "16K", "--dtype", "f64", "--donated", *QUICK]
    command = ["-m", "ringjax.bench", "allreduce", *words, "--json", str(file)]
    job = start_job(2, [sys.executable, *command])
    assert job.wait() == 0, job.logs()
    head, where, names, units, *rows = job.output(0).splitlines()
    assert head.startswith("# ringjax") and "ranks 2" in head
    assert re.fullmatch(r"# \S+: ranks 0-1 on 2 x cpu", where)
    rows = [r for r in rows if not r.startswith(("# *", "# ^"))]
    assert rows.pop().startswith("# Avg bus bandwidth    : ")
    assert rows.pop() == "# Out of bounds values : 0 OK"
    assert names.split()[:2] == ["size", "count"] and "GB/s" in units
    assert [row.split()[:3] for row in rows] == [
        ["1024", "128", "f64"],
        ["4096", "512", "f64"],
        ["16384", "2048", "f64"],
    ]
    assert not job.output(1)
    assert f"\n{names}\n" in job.launcher_output(), "without a prefix"
    written = json.loads(file.read_text())
    assert written["ranks"] == 2 and written["mode"] == "donated"
    assert [row["size"] for row in written["rows"]] == [1024, 4096, 16384]
    assert all(row["algorithm"] for row in written["rows"])


def compared(program: str, *words: str, file: Path) -> tuple[str, list[dict[str, Any]]]:
    """What a comparison with nobody else has printed, and its rows."""
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
    words = ["--quick", "-np", "3", "--rounds", "1"]  # which win over --quick
    file = tmp_path / "rows.json"
    text, rows = compared("benchmarks.collectives", *words, file=file)
    names = ["allreduce", "broadcast", "allgather", "alltoall", "reducescatter"]
    found = [(row["collective"], row["tensors"], row["size"]) for row in rows]
    # A third for each rank, in whole numbers.
    assert found == [(name, 1, size) for name in names for size in (4092, 1048572)]
    assert all(row["ranks"] == 3 and len(row["rounds_us"]) == 1 for row in rows)
    *_, head, first = text[: text.index("allreduce, 1 MiB  ")].splitlines()
    assert head.split() == ["us", "(min", "..", "max)", "ringjax", "foreign"]
    assert first.startswith("allreduce, 4 KiB  ")
