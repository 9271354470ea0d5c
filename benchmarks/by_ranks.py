"""Time and memory against the ranks of one host: `python -m benchmarks.by_ranks`.

Times are those of `benchmarks.collectives`, which takes the same options; start-up and
memory those of `benchmarks.hosts.many_ranks`. What the picture in docs/ shows of both
is written to docs/pictures/ranks.json; `python docs/pictures/draw.py` draws it.
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
from benchmarks.harness import report, session
from benchmarks.hosts import many_ranks

DEFAULTS = "-np 2,3,4,8,16,32 --sizes 4K 1M 16M --peers limit ringjax --rounds 5"
DEFAULTS += " --json build/benchmarks/by_ranks.json"
DATA = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "ranks.json"
PATIENCE = 600.0  # seconds for a job that only starts and looks at its memory
Row = dict[str, Any]


def times(rows: Sequence[Row]) -> list[Row]:
    """Microseconds of ringjax and the limit, by collective, nominal size and ranks."""
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
    """The columns of a row of many_ranks.py that the picture shows."""
    names = ("init s", "init MiB/rank", "shared MiB", "descriptors")
    return {"ranks": row["ranks"]} | {n: float(f"{row[n]:.4g}") for n in names}


def write(data: Row) -> None:
    """Puts it into DATA, a line for each point.

    What is there of other numbers of ranks stays, if it is of this machine: many ranks
    take long, and may be measured apart.
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
    """Measures both, prints the tables and writes the data of the picture."""
    given = sys.argv[1:] if words is None else words
    options = collectives.parse([*DEFAULTS.split(), *given])
    rows, whole = session.run(options, collectives.cases, collectives.show)
    for ranks in options.ranks:
        if found := [row for row in rows if row["ranks"] == ranks]:
            print(f"\n{ranks} ranks, float32\n{collectives.table(found)}")
    starts = [many_ranks.job(ranks, PATIENCE) for ranks in options.ranks]
    print("\n" + many_ranks.table(starts))
    found = report.about() | {"times": times(rows)}
    found["memory"] = [memory(row) for row in starts]
    write(found)
    print(f"\n# written to {options.json} and {DATA}")
    if not whole:
        raise SystemExit("benchmarks.by_ranks: a peer has failed, see above")


if __name__ == "__main__":
    main()
