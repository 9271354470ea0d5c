"""Memory beyond the gradients, and its growth: `python -m benchmarks.memory`.

Starts a world for each case. Compares the resident memory of ranks before the import of
ringjax with the memory after many steps. memory_rank.py is the program of a rank, and
README.md explains the tables. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import jobs, machine, report
from benchmarks.harness.memory_rank import VARIANTS
from benchmarks.harness.options import parse_ranks
from benchmarks.harness.shapes import SETS

RANK = "benchmarks.harness.memory_rank"
MIB = 1 << 20
TARGET = 64 * MIB  # most bytes of a process beyond the gradients
GROWN = {"bytes": 1 * MIB, "descriptors": 1, "threads": 1, "maps": 4}  # 10,000 steps
PER = 10_000
Row = dict[str, Any]


def _total(level: dict[str, int]) -> int:
    return level["private"] + level["shared"] + level["file"]


def extra(found: Row, donated: bool) -> Row:
    """Returns the bytes of one rank, by purpose.

    `program` is the memory for compilation, which any other step needs, too. `results`
    belong to the caller, and are new in each step unless the gradients are donated. All
    other memory is extra, at its peak during the steps.
    """
    levels = (found[name] for name in ("before", "world", "program", "steady"))
    before, world, program, steady = levels
    results = 0 if donated else found["gradients"]
    spared = _total(program) - _total(world) + results
    peak = found["peak"] if found["peak"] is not None else _total(steady)
    return {
        "world": _total(world) - _total(before),
        "program": _total(program) - _total(world),
        "results": results,
        "private": steady["private"] - before["private"] - spared,
        "shared": steady["shared"] - before["shared"],
        "mapped": steady["mapped"] - before["mapped"],
        "steady": _total(steady) - _total(before) - spared,
        "extra": max(peak, _total(steady)) - _total(before) - spared,
    }


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Returns the slope of the line that fits best, by least squares."""
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x0) ** 2 for x in xs)
    if spread == 0:
        return 0.0
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / spread


def growth(series: Sequence[Row]) -> dict[str, float]:
    """Returns the growth in 10,000 steps, without the first tenth of the steps."""
    kept = series[len(series) // 10 :]
    steps = [float(row["step"]) for row in kept]
    return {name: slope(steps, [row[name] for row in kept]) * PER for name in GROWN}


def worst(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the largest value of any rank, by name."""
    return {name: max(row[name] for row in rows) for name in rows[0]}


# -- tables ----------------------------------------------------------------------------


def title(row: Row) -> list[str]:
    return [f"{row['set']}: {row['variant']}", str(row["ranks"])]


def extra_table(rows: Sequence[Row]) -> str:
    names = ("world", "program", "results", "private", "shared", "mapped", "steady")
    names += ("extra",)
    head = ["MiB a process, the worst rank", "ranks", "grads", *names, "nothing", ""]
    lines = [head]
    for row in rows:
        most, alone = row["worst"], row["alone"]
        sizes = [row["gradients"], *(most[name] for name in names), alone]
        cells = ["-" if size is None else f"{size / MIB:.1f}" for size in sizes]
        much = most["extra"] - max(0, alone or 0) > TARGET
        mark = f"more than {TARGET // MIB}" if much else ""
        lines.append([*title(row), *cells, mark])
    return report.columns(lines)


def alone(row: Row, rows: Sequence[Row]) -> float | None:
    """Returns the memory that the same steps need without ringjax, if known."""
    donated = VARIANTS[row["variant"]][1]
    for other in rows:
        same = all(other[name] == row[name] for name in ("ranks", "set", "steps"))
        if same and VARIANTS[other["variant"]] == (None, donated):
            extra: float = other["worst"]["extra"]
            return extra
    return None


def growth_table(rows: Sequence[Row]) -> str:
    """Formats the growth in 10,000 steps, by least squares."""
    rest = list(GROWN)[1:]
    head = [
        "growth in 10,000 steps, the worst rank",
        "ranks",
        "steps",
        "KiB",
        *rest,
        "",
    ]
    lines = [head]
    for row in rows:
        most = row["worst"]
        cells = [str(row["steps"]), f"{most['bytes'] / 1024:.1f}"]
        cells += [f"{most[name]:.2f}" for name in rest]
        grown = [name for name, limit in GROWN.items() if most[name] >= limit]
        mark = f"grows: {', '.join(grown)}" if grown else ""
        lines.append([*title(row), *cells, mark])
    return report.columns(lines)


# -- the command -----------------------------------------------------------------------


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="benchmarks.memory",
        description="Memory that ringjax takes beyond the gradients, and its growth.",
    )
    p.add_argument("-np", dest="ranks", type=parse_ranks, default=[2, 4])
    p.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    p.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    p.add_argument("--steps", type=int, default=PER, help="for growth; 0: none")
    p.add_argument(
        "--growth-sets", nargs="+", choices=SETS, default=["resnet50"], metavar="SET"
    )
    p.add_argument(
        "--shrink",
        type=int,
        default=64,
        help="of each gradient for growth, so that steps are short; 0: full size (64)",
    )
    p.add_argument("--timeout", type=float, default=1200, help="s for a world (1200)")
    p.add_argument("--json", type=Path, default=Path("build/benchmarks/memory.json"))
    options = p.parse_args(words)
    if options.steps < 0 or 0 < options.steps < 100:
        p.error("--steps must be 0, or 100 or more")
    if options.shrink < 0:
        p.error("--shrink must be 0 or more")
    return options


def cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for ranks in options.ranks:
        for name in options.sets:
            for variant in options.variants:
                found.append((ranks, name, variant, 0, 0))
        for name in options.growth_sets if options.steps else ():
            for variant in options.variants:
                found.append((ranks, name, variant, options.steps, options.shrink))
    names = ("ranks", "set", "variant", "steps", "shrink")
    return [dict(zip(names, case, strict=True)) for case in found]


def measure(case: dict[str, Any], timeout: float) -> Row:
    plan = json.dumps(case)
    found = jobs.run(case["ranks"], RANK, plan, timeout=timeout)
    donated = VARIANTS[case["variant"]][1]
    each: list[dict[str, float]]
    if case["steps"]:
        each = [growth(rank["series"]) for rank in found]
    else:
        each = [extra(rank, donated) for rank in found]
    more = {"gradients": found[0]["gradients"], "worst": worst(each), "each": each}
    return {**case, **more, "by_rank": found}


def main(words: Sequence[str] | None = None) -> None:
    """Runs all cases, prints the tables and writes the JSON file."""
    options = parse(words)
    rows: list[Row] = []
    for case in cases(options):
        try:
            rows.append(measure(case, options.timeout))
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            raise SystemExit(f"benchmarks.memory: {error}") from None
        if not case["steps"]:
            rows[-1]["alone"] = alone(rows[-1], rows)
        print(f"# {rows[-1]['set']}: {rows[-1]['variant']}", flush=True)
        # Write after each case, so that an interrupted run keeps its results.
        machine.write_results(options.json, {"rows": rows})
    for table, kept in (
        (extra_table, [row for row in rows if not row["steps"]]),
        (growth_table, [row for row in rows if row["steps"]]),
    ):
        if kept:
            print(f"\n{table(kept)}")
    print(f"\n# written to {options.json}")


if __name__ == "__main__":
    main()
