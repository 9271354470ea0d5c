"""The options of allreduce.py, and the cases for these options.

collectives.py has some of these options, too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import plots
from benchmarks.harness.report import bytes_text
from benchmarks.harness.shapes import SETS, even
from benchmarks.harness.turns import BYTES, Case
from benchmarks.peers.table import PEERS

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 100 * MIB)
FULL_SIZES = tuple(
    sorted((*(4 * KIB << 2 * i for i in range(8)), 100 * MIB, 256 * MIB))
)
FULL_RANKS = [2, 3, 4, 8]
COUNTS = (1, 10, 100, 1000, 10_000)
STREAMED = 64 * MIB


def parse_bytes(text: str) -> int:
    """Parses 4096, 4K or 64MiB; units are powers of 1024."""
    match = re.fullmatch(r"(\d+)([KMG]?)(I?B)?", text.strip().upper())
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 4096, 4K or 64M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def parse_ranks(text: str) -> list[int]:
    """Parses numbers of ranks, such as 2 or 2,4."""
    try:
        ranks = [int(word) for word in text.split(",")]
    except ValueError:
        ranks = []
    if not ranks or min(ranks) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: -np is 2 or more, as in 2 or 2,4")
    return ranks


def parse_python(text: str) -> tuple[str, str]:
    """Parses a peer and its Python, such as horovod=/opt/horovod/bin/python."""
    peer, _, python = text.partition("=")
    if peer not in PEERS or not python:
        raise argparse.ArgumentTypeError(f"{text!r} is not PEER=PYTHON, see --peers")
    found = shutil.which(python) or python
    # Do not resolve links, which lead to another environment.
    return peer, os.path.abspath(found)


def add_measurement_options(p: argparse.ArgumentParser, benchmark: str) -> Any:
    """Adds the options of the measurement, and returns their group."""
    group = p.add_argument_group("how")
    add = group.add_argument
    add("--rounds", type=int, default=9, help="turns of every variant (9)")
    add("--seconds", type=float, default=0.1, help="of one turn (0.1)")
    add(
        "--quiet",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait before rounds until nobody else works, so long in all (0)",
    )
    add(
        "--python",
        nargs="+",
        type=parse_python,
        default=[],
        metavar="PEER=PYTHON",
        help="run a peer by the Python of another environment",
    )
    add("--mpirun", default="mpirun", help="starts MPI programs (mpirun)")
    add(
        "--mpich",
        default="mpirun.mpich",
        help="MPICH's (mpirun.mpich)",
        metavar="MPIRUN",
    )
    add("--json", type=Path, default=Path("build/benchmarks", f"{benchmark}.json"))
    p.set_defaults(program=f"benchmarks.{benchmark}")
    return group


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="benchmarks.allreduce",
        description="Compares allreduce of ringjax with its peers and with the limit.",
    )
    what = p.add_argument_group("what")
    what.add_argument(
        "-np",
        dest="ranks",
        type=parse_ranks,
        help="ranks: 2, or one after the other: 2,4",
    )
    peers = [*PEERS, "all"]
    what.add_argument("--peers", nargs="+", choices=peers, default=["all"])
    what.add_argument(
        "--sizes", nargs="*", type=parse_bytes, help="of one array (4K … 100M)"
    )
    what.add_argument("--dtype", nargs="+", choices=BYTES, default=["float32"])
    what.add_argument("--sets", nargs="*", choices=SETS, help="of gradients (resnet50)")
    what.add_argument("--no-model", action="store_true", help="no set of gradients")
    what.add_argument(
        "--counts",
        nargs="*",
        type=int,
        help="the same bytes in 1, 10, … 10,000 tensors, or in so many",
    )
    what.add_argument(
        "--total", type=parse_bytes, default=16 * MIB, help="bytes of --counts (16M)"
    )
    what.add_argument("--no-tcp", action="store_true", help="no loopback TCP")
    what.add_argument(
        "--full", action="store_true", help="all sizes, sets, dtypes and 2,3,4,8 ranks"
    )
    group = add_measurement_options(p, "allreduce")
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="needs matplotlib; also FILE-counts",
    )
    return p


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options. Ends the process with a message if they are wrong."""
    p = _parser()
    options = p.parse_args(words)
    if "all" in options.peers:
        options.peers = [name for name, entry in PEERS.items() if entry.usual]
    if options.full:
        options.dtype = list(BYTES)
    options.python = dict(options.python)
    full = options.full
    if options.ranks is None:
        options.ranks = FULL_RANKS if full else [2]
    if options.sizes is None:
        options.sizes = list(FULL_SIZES if full else SIZES)
    if options.sets is None:
        options.sets = list(SETS) if full else ["resnet50"]
    if options.no_model:
        options.sets = []
    if options.counts == []:
        options.counts = list(COUNTS)
    options.counts = options.counts or []
    if options.rounds < 1 or min(options.sizes, default=4) < 4:
        p.error("--rounds must be 1 or more, --sizes 4 or more")
    if options.counts and not 1 <= min(options.counts) <= max(options.counts) <= (
        options.total // 4
    ):
        p.error("--counts must be 1 or more, and no more than --total has numbers")
    if options.plot and (problem := plots.missing()):
        p.error(problem)
    return options


def cases(options: argparse.Namespace, ranks: int) -> list[Case]:
    """Returns the cases for `ranks` ranks."""
    found = []
    for dtype in options.dtype:
        width = BYTES[dtype]
        for size in options.sizes:
            title = f"{bytes_text(size)}, {dtype}, sum"
            found.append(Case(title, [(size // width,)], "arrays", dtype))
        for name in options.sets:
            people, make = SETS[name]
            case = Case("", make(), "models", dtype)
            title = f"gradients of {people} ({len(case.shapes)} tensors, "
            title += f"{case.size / 1e6:.0f} MB {dtype}), mean"
            found.append(Case(title, case.shapes, "models", dtype))
        for tensors in options.counts:
            title = f"{bytes_text(options.total)} in {tensors} tensors, {dtype}, mean"
            shapes = even(tensors, options.total // width)
            found.append(Case(title, shapes, "models", dtype, counts=True))
    if ranks == 2 and not options.no_tcp:
        title = f"loopback TCP, {bytes_text(STREAMED)} in all"
        found.append(Case(title, [(STREAMED // 4,)], "streams"))
    return found
