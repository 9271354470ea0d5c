"""All collectives of all peers in one table: `python -m benchmarks.collectives`.

The peers take turns as in allreduce.py. Each peer has one variant, which copies least.
Only the limit has several variants, of which the best counts. README.md explains the
table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import session
from benchmarks.harness.options import (
    KIB,
    MIB,
    add_measurement_options,
    parse_bytes,
    parse_ranks,
)
from benchmarks.harness.report import bytes_text, columns, ratios, spread
from benchmarks.harness.turns import Case
from benchmarks.peers.adapter import COLLECTIVES
from benchmarks.peers.table import MPI, PEERS

# Ranks of these peers give the very array that the harness has made.
FRESH = ["ringjax", *MPI, "oneccl"]
NAMES = [name for name, entry in PEERS.items() if entry.kind.collectives]
# ringjax over TCP is slower than all peers that share memory.
USUAL = [name for name in NAMES if PEERS[name].usual and name != "ringjax-tcp"]
SIZES = (4 * KIB, 64 * KIB, MIB, 64 * MIB)
QUICK = {"ranks": [2], "sizes": [4 * KIB, MIB], "rounds": 2, "seconds": 0.01}
SHARE = "of limit"
Row = dict[str, Any]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options. Ends the process with a message if they are wrong."""
    p = argparse.ArgumentParser(
        prog="benchmarks.collectives",
        description="Compares all collectives of ringjax with those of its peers.",
    )
    what = p.add_argument_group("what")
    what.add_argument("-np", dest="ranks", type=parse_ranks, default=[2, 4])
    what.add_argument("--peers", nargs="+", choices=NAMES)
    what.add_argument(
        "--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES
    )
    what.add_argument(
        "--sizes",
        nargs="+",
        type=parse_bytes,
        default=SIZES,
        help="of the whole vector (4K 64K 1M 64M)",
    )
    what.add_argument(
        "--fresh",
        action="store_true",
        help=f"what is given is written anew before each call ({', '.join(FRESH)})",
    )
    what.add_argument(
        "--quick", action="store_true", help="seconds: whether it works, not how fast"
    )
    add_measurement_options(p, "collectives")
    if p.parse_args(words).quick:
        p.set_defaults(**QUICK)
    options = p.parse_args(words)
    able = FRESH if options.fresh else NAMES
    options.peers = options.peers or (FRESH if options.fresh else USUAL)
    if unable := sorted(set(options.peers) - set(able)):
        p.error(f"--fresh: not with {', '.join(unable)}")
    least = 4 * max(options.ranks)
    if options.rounds < 1 or min(options.sizes) < least:
        p.error(f"--rounds must be 1 or more, --sizes {least} or more")
    options.python, options.dtype = dict(options.python), ["float32"]
    return options


def cases(options: argparse.Namespace, ranks: int) -> list[Case]:
    """Returns the cases for `ranks` ranks; each rank has a whole number of floats."""
    return [
        Case(
            f"{name}, {bytes_text(size)}",
            [(size // 4 // ranks * ranks,)],
            "collectives",
            collective=name,
            fresh=options.fresh,
        )
        for name in options.collectives
        for size in options.sizes
    ]


def rounds_of(row: Row) -> list[float]:
    """Returns the median of each round, in microseconds."""
    return [statistics.median(batches) for batches in row["rounds_us"]]


def best(rows: Sequence[Row]) -> dict[str, Row]:
    """Returns the variant with the fastest round of each peer, like turns.compare."""
    found: dict[str, Row] = {}
    for row in rows:
        other = found.get(row["peer"])
        if other is None or min(rounds_of(row)) < min(rounds_of(other)):
            found[row["peer"]] = row
    return found


def cell(row: Row, mpi: Row | None) -> str:
    """Formats microseconds, the spread over rounds, and the ratio to the best MPI."""
    times = rounds_of(row)
    text = spread(times, 0 if min(times) >= 1000 else 1)
    if mpi is None:
        return text
    return f"{text} {statistics.median(ratios(times, rounds_of(mpi))):6.2f}"


def table(rows: Sequence[Row]) -> str:
    """Formats the rows of one number of ranks: a line per case, a column per peer.

    If the limit was measured, a further column has the share of it that ringjax
    reaches.
    """
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row["case"], []).append(row)
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    shown = list(peers)
    if {"limit", "ringjax"} <= set(peers):
        shown.insert(shown.index("ringjax") + 1, SHARE)
    head = "us (min .. max)" + (" / MPI" if any(p in MPI for p in peers) else "")
    text = [[head, *shown, "foreign"]]
    for case, of_case in lines.items():
        found = best(of_case)
        mpis = [found[peer] for peer in MPI if peer in found]
        mpi = min(mpis, key=lambda row: min(rounds_of(row)), default=None)
        cells = {peer: cell(row, mpi) for peer, row in found.items()}
        if (share := found.get("ringjax", {}).get("share")) is not None:
            cells[SHARE] = f"{share:.2f}"
        foreign = [r["foreign"] for r in found.values() if r["foreign"] is not None]
        last = f"{max(foreign):.2f}" if foreign else "-"
        text.append([case, *(cells.get(column, "-") for column in shown), last])
    return columns(text)


def show(case: Case, ranks: int, rows: Sequence[Row]) -> None:
    found = best(rows).items()
    times = (f"{peer} {statistics.median(rounds_of(row)):.1f}" for peer, row in found)
    print(f"# {case.title}: {', '.join(times)}", flush=True)


def measure(options: argparse.Namespace) -> tuple[list[Row], bool]:
    """Runs all cases, and prints a table for each number of ranks; see session.run."""
    rows, complete = session.run(options, cases, show)
    for ranks in options.ranks:
        if found := [row for row in rows if row["ranks"] == ranks]:
            print(f"\n{ranks} ranks, float32\n{table(found)}")
    return rows, complete


def main(words: Sequence[str] | None = None) -> None:
    """Runs all cases, prints the tables and writes the JSON file."""
    options = parse(words)
    _, complete = measure(options)
    session.finish(options, complete)


if __name__ == "__main__":
    main()
