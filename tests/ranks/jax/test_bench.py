"""ringjax.bench on real ranks. No test depends on a measured time."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from support.launch import StartJob
from support.rank_worker import World

pytestmark = pytest.mark.launch("collectives")
THREE_RANKS = pytest.mark.ranks(3)
QUICK = ["-n", "2", "-w", "1"]
ALSO_ON_ONE_RANK = ("allreduce", "barrier")


@THREE_RANKS
@pytest.mark.parametrize("mode", ["--jit", "--eager"])
@pytest.mark.parametrize(
    "collective",
    [
        *("allgather", "broadcast", "reducescatter", "alltoall"),
        *(pytest.param(c, marks=pytest.mark.ranks(1, 3)) for c in ALSO_ON_ONE_RANK),
    ],
)
def test_every_collective_is_checked_and_timed(
    world: World, collective: str, mode: str
) -> None:
    from ringjax import bench

    options = bench.parse([collective, mode, *QUICK])
    row = bench.Bench(options).measure(4096)
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


@THREE_RANKS
@pytest.mark.parametrize("dtype", ["f16", "bf16", "i32", "u8"])
@pytest.mark.parametrize("op", ["Average", "Product", "Min"])
def test_reductions_of_other_types(world: World, dtype: str, op: str) -> None:
    from ringjax import bench

    words = ["reducescatter", "--dtype", dtype, "--op", op, *QUICK]
    assert bench.Bench(bench.parse(words)).measure(1000)["dtype"] == dtype


@THREE_RANKS
def test_a_wrong_result_ends_the_benchmark(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringjax import bench, collectives

    monkeypatch.setattr(collectives, "allreduce", lambda x, op: x)
    with pytest.raises(ArithmeticError, match=f"rank {world.rank}: allreduce of 64 B"):
        bench.Bench(bench.parse(["allreduce", *QUICK])).measure(64)


def test_the_benchmark_runs_as_a_command(start_job: StartJob, tmp_path: Path) -> None:
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
