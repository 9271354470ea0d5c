"""Compares allreduce of ringjax with its peers: `python -m benchmarks.allreduce`.

All peers are started at once and take turns: each round asks every variant for a short
burst, so that what else the machine does meets all of them alike. The limit is one of
them. What is called, is in peers/; how to read the table, in README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import launchers, plots, report
from benchmarks.harness.options import cases, parse
from benchmarks.harness.turns import Case, Quiet, measure
from benchmarks.harness.worlds import World, WorldError, close_when_terminated
from benchmarks.peers.table import PEERS


def start(ranks: int, options: argparse.Namespace, folder: Path) -> list[World]:
    """The worlds of all peers that are installed here; the others with a reason."""
    worlds = []
    for peer in options.peers:
        try:
            python = launchers.interpreter(peer, options)
            launch = launchers.find(PEERS[peer], ranks, options, folder, python)
            worlds.append(World(peer, ranks, folder, launch))
            lacks = [d for d in options.dtype if d not in worlds[-1].dtypes]
            without = f"; left out of {', '.join(lacks)}" if lacks else ""
            print(f"# {peer}: {worlds[-1].version}{without}", flush=True)
        except launchers.Absent as reason:
            print(f"# {peer}: left out, {reason}", flush=True)
        except WorldError as error:
            print(f"# left out: {error}", flush=True)
    return worlds


def show(case: Case, ranks: int, rows: Sequence[dict[str, Any]]) -> None:
    """Prints what came of a case."""
    if rows:
        print(report.table(f"{ranks} ranks: {case.title}", rows))
        if ratios := report.ratio_table(rows):
            print(ratios)
    print(end="", flush=True)


def compare(
    ranks: int, options: argparse.Namespace, quiet: Quiet
) -> tuple[list[dict[str, Any]], dict[str, str], bool]:
    """All cases with so many ranks: rows, versions, and whether no peer failed."""
    print(f"\n# {ranks} ranks on {os.cpu_count()} CPUs, {options.rounds} rounds;")
    print("# times in us, algbw and busbw in GB/s; see benchmarks/README.md")
    rows: list[dict[str, Any]] = []
    worlds: list[World] = []
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="ringjax-bench-") as folder:
        try:
            worlds = start(ranks, options, Path(folder))
            versions = {world.peer: world.version for world in worlds}
            for case in cases(options, ranks):
                found = measure(worlds, case, ranks, options, quiet)
                show(case, ranks, found)
                rows += found
        finally:
            for world in worlds:
                world.close()
    return rows, versions, bool(worlds) and len(worlds) == len(versions)


def main(words: Sequence[str] | None = None) -> None:
    """Runs everything, prints the tables and writes the JSON file."""
    options = parse(words)
    close_when_terminated()
    about = report.about()
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    whole, quiet = True, Quiet(options.quiet)
    for ranks in options.ranks:
        found, theirs, complete = compare(ranks, options, quiet)
        rows, versions, whole = rows + found, versions | theirs, whole and complete
        # After each: a long run that is interrupted has not been for nothing.
        said = {**about, "ranks": options.ranks, "rounds": options.rounds}
        said |= {"versions": versions, "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(said, indent=1) + "\n")
    if text := report.counts_table(rows):
        print(text)
    print(f"\n# written to {options.json}")
    if options.plot:
        for file in plots.draw(rows, options.plot):
            print(f"# drawn: {file}")
    if not whole:
        raise SystemExit("benchmarks.allreduce: a peer has failed, see above")


if __name__ == "__main__":
    main()
