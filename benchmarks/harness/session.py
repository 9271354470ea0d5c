"""A whole comparison: all peers that are installed, all cases, all numbers of ranks.

allreduce.py and collectives.py decide on the cases and on the output.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import launchers, machine
from benchmarks.harness.turns import Case, Quiet, measure
from benchmarks.harness.worlds import World, WorldError, close_when_terminated
from benchmarks.peers.table import PEERS

Row = dict[str, Any]
Cases = Callable[[argparse.Namespace, int], Sequence[Case]]
Show = Callable[[Case, int, Sequence[Row]], None]


def start(ranks: int, options: argparse.Namespace, folder: Path) -> list[World]:
    """Starts the worlds of all installed peers; prints why other peers are absent."""
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


def compare(
    ranks: int, options: argparse.Namespace, quiet: Quiet, cases: Cases, show: Show
) -> tuple[list[Row], dict[str, str], bool]:
    """Measures all cases; returns rows, versions, and whether no peer failed."""
    print(f"\n# {ranks} ranks on {os.cpu_count()} CPUs, {options.rounds} rounds")
    rows: list[Row] = []
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


def run(
    options: argparse.Namespace, cases: Cases, show: Show
) -> tuple[list[Row], bool]:
    """Measures all cases. Returns the rows, and whether no peer failed.

    `finish` reports the result after the caller has printed its tables.
    """
    close_when_terminated()
    rows: list[Row] = []
    versions: dict[str, str] = {}
    complete, quiet = True, Quiet(options.quiet)
    for ranks in options.ranks:
        found, theirs, ok = compare(ranks, options, quiet, cases, show)
        rows, versions, complete = rows + found, versions | theirs, complete and ok
        # Write after each number of ranks, so that an interrupted run keeps its rows.
        about = {"ranks": options.ranks, "rounds": options.rounds, "versions": versions}
        machine.write_results(options.json, {**about, "rows": rows})
    return rows, complete


def finish(options: argparse.Namespace, complete: bool, *others: Path) -> None:
    """Prints the files of results. Ends the program with an error if a peer failed."""
    print(f"\n# written to {' and '.join(map(str, [options.json, *others]))}")
    if not complete:
        raise SystemExit(f"{options.program}: a peer has failed, see above")
