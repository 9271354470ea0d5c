"""Compares allreduce of ringjax with its peers: `python -m benchmarks.allreduce`.

All peers are started together and take turns: each round requests a short burst of
every variant, so that other work of the machine slows all variants equally. The limit
is one of the peers. The calls are in peers/, and README.md explains the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import plots, report, session
from benchmarks.harness.options import cases, parse
from benchmarks.harness.turns import Case


def show(case: Case, ranks: int, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        print(report.table(f"{ranks} ranks: {case.title}", rows))
        if ratios := report.ratio_table(rows):
            print(ratios)
    print(end="", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Runs all cases, prints the tables and writes the JSON file."""
    options = parse(words)
    print("# times in us, algbw and busbw in GB/s; see benchmarks/README.md")
    rows, complete = session.run(options, cases, show)
    if text := report.counts_table(rows):
        print(text)
    if options.plot:
        for file in plots.draw(rows, options.plot):
            print(f"# drawn: {file}")
    session.finish(options, complete)


if __name__ == "__main__":
    main()
