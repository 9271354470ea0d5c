"""Time and memory against the ranks of one host: `python -m benchmarks.by_ranks`.

`benchmarks.collectives`, which has the same options, measures the times, and
`benchmarks.hosts.many_ranks` measures start-up and memory. The numbers for the picture
in docs/ are written to docs/pictures/ranks.json; `python docs/pictures/draw.py` draws
the picture.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import collectives
from benchmarks.harness import machine, session
from benchmarks.hosts import many_ranks

DEFAULTS = "-np 2,3,4,8,16,32 --sizes 4K 1M 16M --peers limit ringjax --rounds 5"
DEFAULTS += " --json build/benchmarks/by_ranks.json"
DATA = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "ranks.json"
JOB_LIMIT = 600.0  # seconds for a job that only starts and measures its memory
Row = dict[str, Any]


def times(rows: Sequence[Row]) -> list[Row]:
    """Returns microseconds of ringjax and the limit, by collective, size and ranks."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["ranks"], row["case"]), []).append(row)
    found = []
    for (ranks, case), of_case in groups.items():
        best = collectives.best(of_case)
        if "ringjax" not in best:
            continue
        collective, _, size = case.partition(", ")
        point: Row = {"collective": collective, "size": size, "ranks": ranks}
        for name, peer in (("us", "ringjax"), ("limit_us", "limit")):
            if peer in best:
                median = statistics.median(collectives.rounds_of(best[peer]))
                point[name] = float(f"{median:.4g}")
        found.append(point)
    return found


def memory(row: Row) -> Row:
    """Returns the columns of a row of many_ranks.py that the picture shows."""
    names = ("init s", "init MiB/rank", "shared MiB", "descriptors")
    return {"ranks": row["ranks"]} | {n: float(f"{row[n]:.4g}") for n in names}


def write(data: Row) -> None:
    """Writes the points into DATA, a line for each point.

    Points of this machine with other numbers of ranks stay, because many ranks need
    much time and may be measured separately.
    """
    old = json.loads(DATA.read_text()) if DATA.exists() else {}
    measured = {row["ranks"] for row in data["memory"]}
    for key in ("times", "memory"):
        kept = old.get(key, []) if old.get("machine") == data["machine"] else []
        points = [p for p in kept if p["ranks"] not in measured] + data[key]
        data[key] = sorted(points, key=lambda p: int(p["ranks"]))
    text = json.dumps(data, indent=1)
    DATA.write_text(re.sub(r"\n {3,}|\n  (?=\})", " ", text) + "\n")


def main(words: Sequence[str] | None = None) -> None:
    """Measures times and memory, prints tables and writes the picture's data."""
    given = sys.argv[1:] if words is None else words
    options = collectives.parse([*DEFAULTS.split(), *given])
    options.program = "benchmarks.by_ranks"
    rows, complete = collectives.measure(options)
    starts = [many_ranks.job(ranks, JOB_LIMIT) for ranks in options.ranks]
    print("\n" + many_ranks.table(starts))
    points = {"times": times(rows), "memory": [memory(row) for row in starts]}
    write(machine.describe() | points)
    session.finish(options, complete, DATA)


if __name__ == "__main__":
    main()
