"""Compares allreduce of ringjax with its peers: `python -m benchmarks.allreduce`.

All peers are started at once and take turns: each round asks every variant for a short
burst, so that what else the machine does meets all of them alike. What is called, is in
peers.py; how to read the table, in README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import resource
import shlex
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import PEERS
from benchmarks.worlds import World, WorldError

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
BURST = 0.005  # seconds: calls of one batch, where one call takes less
BATCHES = 3, 25
Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """The 161 gradients of ResNet-50: 25.6 million numbers."""
    kernels, width = [(7, 7, 3, 64)], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            kernels += [(1, 1, width, inner), (3, 3, inner, inner)]
            kernels += [(1, 1, inner, 4 * inner)]
            if block == 0:
                kernels.append((1, 1, width, 4 * inner))
            width = 4 * inner
    shapes: Shapes = []
    for kernel in kernels:
        shapes += [kernel, kernel[-1:], kernel[-1:]]  # with a scale and a bias each
    return [*shapes, (width, 1000), (1000,)]


@dataclass
class Variant:
    """One way of one peer, and what was measured of it in one case."""

    world: World
    name: str
    calls: int = 1
    batches: int = BATCHES[0]
    rounds: list[list[float]] = field(default_factory=list)
    wall: float = 0.0
    busy: float = 0.0  # CPU seconds of the machine meanwhile
    own: float = 0.0  # CPU seconds of the ranks and of this process

    def burst(self) -> list[float]:
        """Seconds per call, batch by batch, of the rank that took longest."""
        start = _clocks()
        answers = self.world.ask(
            do="run", variant=self.name, batches=self.batches, calls=self.calls
        )
        wall, busy, own = (b - a for a, b in zip(start, _clocks(), strict=True))
        self.wall, self.busy = self.wall + wall, self.busy + busy
        self.own += own + sum(a["cpu"] for a in answers)
        return [max(t) for t in zip(*(a["seconds"] for a in answers), strict=True)]

    def settle(self, seconds: float) -> None:
        """Warms up and chooses the length of the bursts."""
        self.batches, self.calls = 1, 3
        self.burst()
        (call,) = self.burst()
        self.calls = max(1, min(500, round(BURST / call)))
        batches = round(seconds / (call * self.calls))
        self.batches = max(BATCHES[0], min(BATCHES[1], batches))
        self.wall = self.busy = self.own = 0.0

    def row(self, base: Variant | None, ranks: int, size: int) -> dict[str, Any]:
        """What is reported; `base` is the variant that ratios refer to."""
        times = sorted(t * 1e6 for batches in self.rounds for t in batches)
        tenth = len(times) // 10
        median = statistics.median(times)
        foreign = (self.busy - self.own) / (self.wall * (os.cpu_count() or 1))
        ratios = [
            statistics.median(mine) / statistics.median(theirs)
            for mine, theirs in zip(
                self.rounds, base.rounds if base else (), strict=False
            )
        ]
        return {
            "peer": self.world.peer,
            "variant": self.name,
            "us_median": median,
            "us_p10": times[tenth],
            "us_p90": times[-1 - tenth],
            "us_min": times[0],
            "busbw": size / median / 1e3 * 2 * (ranks - 1) / ranks,
            "ratio": statistics.median(ratios) if ratios else None,
            "ratio_min": min(ratios, default=None),
            "ratio_max": max(ratios, default=None),
            # The kernel counts in ticks of 10 ms: a short time says nothing.
            "foreign": max(0.0, foreign) if self.wall > 0.2 else None,
            "rounds_us": [[t * 1e6 for t in batches] for batches in self.rounds],
        }


def measure(
    worlds: list[World], shapes: Shapes, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One case: every variant of every world, in turns; drops worlds that fail."""
    size = 4 * sum(math.prod(s) for s in shapes)
    variants: list[Variant] = []
    for world in list(worlds):
        names = world.arrays if len(shapes) == 1 else world.models
        found = [Variant(world, name) for name in names]
        try:
            world.ask(do="prepare", variants=names, shapes=shapes)
            for variant in found:
                variant.settle(options.seconds)
            variants += found
        except WorldError as error:
            _drop(worlds, world, error)
    for turn in range(options.rounds):
        first = turn % max(1, len(variants))  # nobody is always after the same one
        for variant in variants[first:] + variants[:first]:
            if variant.world in worlds:
                try:
                    variant.rounds.append(variant.burst())
                except WorldError as error:
                    _drop(worlds, variant.world, error)
    variants = [v for v in variants if v.world in worlds]
    base = next((v for v in variants if v.world.peer == "ringjax"), None)
    return [{"size": size, **v.row(base, options.ranks, size)} for v in variants]


def start(worlds: list[World], options: argparse.Namespace, folder: Path) -> None:
    """Adds the worlds of all peers that are installed here."""
    for peer in options.peers:
        module = PEERS[peer][1]
        program = shlex.split(options.mpirun)[0] if peer == "mpi4py" else None
        if importlib.util.find_spec(module) is None:
            print(f"# {peer}: left out, no module {module} here")
        elif program and shutil.which(program) is None:
            print(f"# {peer}: left out, no program {program} here")
        else:
            try:
                worlds.append(World(peer, options.ranks, folder, options.mpirun))
                print(f"# {peer}: {worlds[-1].version}", flush=True)
            except WorldError as error:
                print(f"# left out: {error}", flush=True)


def table(title: str, rows: list[dict[str, Any]]) -> str:
    """The rows of one case as text."""
    lines = [
        f"\n{title}",
        f"{'peer':44} {'median':>10} {'p10':>10} {'p90':>10} {'busbw':>7} "
        f"{'x ringjax':>9} {'(min .. max)':>15} {'foreign':>7}",
    ]
    for row in rows:
        ratio, spread = "-", ""
        if row["ratio"] is not None:
            ratio = f"{row['ratio']:.2f}"
            spread = f"({row['ratio_min']:.2f} .. {row['ratio_max']:.2f})"
        foreign = "-" if row["foreign"] is None else f"{row['foreign']:.2f}"
        lines.append(
            f"{row['peer'] + ': ' + row['variant']:44} {row['us_median']:10.1f} "
            f"{row['us_p10']:10.1f} {row['us_p90']:10.1f} {row['busbw']:7.2f} "
            f"{ratio:>9} {spread:>15} {foreign:>7}"
        )
    return "\n".join(lines)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ends the process with a message if they are wrong."""
    p = argparse.ArgumentParser(prog="benchmarks.allreduce", description=__doc__)
    p.add_argument("-np", dest="ranks", type=int, default=2, help="ranks (2)")
    p.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    p.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="bytes")
    p.add_argument("--no-model", action="store_true", help="without ResNet-50")
    p.add_argument("--rounds", type=int, default=9, help="turns of every variant (9)")
    p.add_argument("--seconds", type=float, default=0.1, help="of one turn (0.1)")
    p.add_argument("--mpirun", default="mpirun", help="starts MPI programs (mpirun)")
    p.add_argument("--json", type=Path, default=Path("build/benchmarks/allreduce.json"))
    options = p.parse_args(words)
    if options.ranks < 2 or options.rounds < 1 or min(options.sizes, default=4) < 4:
        p.error("-np must be 2 or more, --rounds 1 or more, --sizes 4 or more")
    return options


def main(words: Sequence[str] | None = None) -> None:
    """Runs everything, prints the tables and writes the JSON file."""
    options = parse(words)
    cases: list[tuple[str, Shapes]] = [
        (f"{_bytes(size)}, float32, sum", [(size // 4,)]) for size in options.sizes
    ]
    if not options.no_model:
        cases.append(("gradients of ResNet-50 (161 tensors, 102 MB), mean", resnet50()))
    print(f"# {options.ranks} ranks on {os.cpu_count()} CPUs, {options.rounds} rounds;")
    print("# times in us, busbw in GB/s, ratios to the first variant of ringjax")
    worlds: list[World] = []
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ringjax-bench-") as folder:
        try:
            start(worlds, options, Path(folder))
            versions = {world.peer: world.version for world in worlds}
            for title, shapes in cases:
                rows = measure(worlds, shapes, options)
                print(table(title, rows), flush=True)
                results += [{"case": title, **row} for row in rows]
        finally:
            for world in worlds:
                world.close()
    about = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release()},
        "ranks": options.ranks,
        "rounds": options.rounds,
        "versions": versions,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**about, "rows": results}, indent=1) + "\n")
    print(f"\n# written to {options.json}")
    if not worlds or len(worlds) < len(versions):
        raise SystemExit("benchmarks.allreduce: a peer has failed, see above")


def _drop(worlds: list[World], world: World, error: WorldError) -> None:
    print(f"# left out from here on: {error}", flush=True)
    worlds.remove(world)
    world.close()


def _clocks() -> tuple[float, float, float]:
    """Wall clock, CPU seconds of the whole machine, CPU seconds of this process."""
    with Path("/proc/stat").open() as stat:
        # user nice system idle iowait irq softirq steal, then guests (in user already)
        ticks = [int(n) for n in stat.readline().split()[1:9]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    own = resource.getrusage(resource.RUSAGE_SELF)
    return time.monotonic(), busy, own.ru_utime + own.ru_stime


def _bytes(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


if __name__ == "__main__":
    main()
