"""Cases, and how the peers take turns in one: bursts, rounds, and what comes of them.

Prints nothing but what is left out, and why. Tables are in report.py.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.shapes import Shapes, count
from benchmarks.harness.worlds import World, WorldError

BURST = 0.005  # seconds: calls of one batch, where one call takes less
BATCHES = 3, 25
BYTES = {"float32": 4, "bfloat16": 2}
COPIES = 2  # a variant holds its tensors twice: input and result, or input and buckets


@dataclass(frozen=True)
class Case:
    """The work that every variant is asked to do.

    Attributes:
      title: for people.
      shapes: of the tensors.
      kind: one of KINDS (adapter.py); a peer has other variants for each.
      dtype: of the tensors.
      counts: this case is a point of time against the number of tensors.
      network: of torch_networks.py, to be trained, with parameters of these shapes.
      collective: one of COLLECTIVES; the one shape is that of the whole vector.
      fresh: what is given to it is written anew before each call.
    """

    title: str
    shapes: Shapes
    kind: str = "arrays"
    dtype: str = "float32"
    counts: bool = False
    network: str = ""
    collective: str = ""
    fresh: bool = False

    @property
    def size(self) -> int:
        return BYTES[self.dtype] * count(self.shapes)

    def bus_factor(self, ranks: int) -> float:
        """Bytes over the busiest link for each byte of size, at the least."""
        # Streams carry these bytes once, and nobody shares them out.
        if self.kind == "streams" or self.collective == "broadcast":
            return 1.0
        times = 2 if self.collective in ("", "allreduce") else 1
        return times * (ranks - 1) / ranks


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

    def quietest(self) -> float:
        """Seconds of a call, the median of the round in which that is least."""
        return min(map(statistics.median, self.rounds))

    def over(self, other: Variant) -> list[float]:
        """This time over the time of another, in each round."""
        return [
            statistics.median(mine) / statistics.median(theirs)
            for mine, theirs in zip(self.rounds, other.rounds, strict=False)
        ]

    def row(self, case: Case, ranks: int) -> dict[str, Any]:
        """The numbers of this variant alone."""
        times = sorted(t * 1e6 for batches in self.rounds for t in batches)
        tenth = len(times) // 10
        median = statistics.median(times)
        foreign = (self.busy - self.own) / (self.wall * (os.cpu_count() or 1))
        algbw = case.size / median / 1e3
        return {
            "peer": self.world.peer,
            "variant": self.name,
            "us_median": median,
            "us_p10": times[tenth],
            "us_p90": times[-1 - tenth],
            "us_min": times[0],
            "cpu_us": self.own * 1e6 / (self.calls * len(times) * ranks),
            "algbw": algbw,
            "busbw": algbw * case.bus_factor(ranks),
            # The kernel counts in ticks of 10 ms: a short time says nothing.
            "foreign": max(0.0, foreign) if self.wall > 0.2 else None,
            "rounds_us": [[t * 1e6 for t in batches] for batches in self.rounds],
        }


def compare(
    variants: Sequence[Variant], case: Case, ranks: int
) -> list[dict[str, Any]]:
    """The rows of one case, with ratios: medians of those within the rounds.

    `ratio` is to the first variant of ringjax, `share` the time of the limit's best
    variant over this one's, `against` the time of every peer's best variant over it.
    Best is what has the fastest round: a busy minute must not choose another.
    """
    best: dict[str, Variant] = {}
    for variant in variants:
        peer = variant.world.peer
        if peer not in best or variant.quietest() < best[peer].quietest():
            best[peer] = variant
    base = next((v for v in variants if v.world.peer == "ringjax"), None)
    rows = []
    for variant in variants:
        ratios = variant.over(base) if base else []
        against = {
            peer: statistics.median(other.over(variant)) for peer, other in best.items()
        }
        rows.append(
            {
                **variant.row(case, ranks),
                "ratio": statistics.median(ratios) if ratios else None,
                "ratio_min": min(ratios, default=None),
                "ratio_max": max(ratios, default=None),
                "share": against.get("limit"),
                "against": against,
            }
        )
    return rows


def affordable(counts: Sequence[int], size: int, ranks: int, memory: int) -> int:
    """How many variants of each peer fit into memory at once; `counts` it has."""
    most = max(counts, default=0)
    while most and COPIES * size * ranks * sum(min(most, n) for n in counts) > memory:
        most -= 1
    return most


def able(world: World, case: Case) -> list[str]:
    """The variants of a peer that a case is for."""
    if case.dtype not in world.dtypes:
        return []
    if case.network and case.network not in world.networks:
        return []
    return [
        name
        for name in world.variants[case.kind]
        if case.collective in ("", name.partition(": ")[0])
    ]


class Quiet:
    """Waits for moments in which nobody else works, `patience` seconds in all."""

    def __init__(self, patience: float) -> None:
        self.left = patience

    def wait(self) -> None:
        """Returns after a quiet quarter of a second, or when patience has run out."""
        while self.left > 0:
            start = _clocks()
            time.sleep(0.25)
            wall, busy, _ = (b - a for a, b in zip(start, _clocks(), strict=True))
            self.left -= wall
            if busy < 0.1 * wall * (os.cpu_count() or 1):
                return


def measure(
    worlds: list[World],
    case: Case,
    ranks: int,
    options: argparse.Namespace,
    quiet: Quiet,
) -> list[dict[str, Any]]:
    """One case: every variant of every world, in turns; drops worlds that fail."""
    asked = [(world, names) for world in worlds if (names := able(world, case))]
    most = affordable([len(n) for _, n in asked], case.size, ranks, _free_memory())
    if any(len(names) > most for _, names in asked):
        print(f"# only {most} variants of each peer: memory holds no more", flush=True)
    variants: list[Variant] = []
    for world, names in asked:
        found = [Variant(world, name) for name in names[:most]]
        try:
            world.ask(
                do="prepare",
                variants=names[:most],
                shapes=case.shapes,
                dtype=case.dtype,
                network=case.network,
                collective=bool(case.collective),
                fresh=case.fresh,
            )
            for variant in found:
                variant.settle(options.seconds)
            variants += found
        except WorldError as error:
            _drop(worlds, world, error)
    for turn in range(options.rounds):
        quiet.wait()
        first = turn % max(1, len(variants))  # nobody is always after the same one
        for variant in variants[first:] + variants[:first]:
            if variant.world in worlds:
                try:
                    variant.rounds.append(variant.burst())
                except WorldError as error:
                    _drop(worlds, variant.world, error)
    variants = [v for v in variants if v.world in worlds]
    about: dict[str, Any] = {"case": case.title, "kind": case.kind, "ranks": ranks}
    about |= {"dtype": case.dtype, "counts": case.counts}
    about |= {"collective": case.collective, "fresh": case.fresh}
    about |= {"tensors": len(case.shapes), "size": case.size}
    return [{**about, **row} for row in compare(variants, case, ranks)]


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


def _free_memory() -> int:
    """Bytes that may be used: three quarters of what is available."""
    with Path("/proc/meminfo").open() as lines:
        known = dict(line.split(":") for line in lines)
    return int(known["MemAvailable"].split()[0]) * 1024 * 3 // 4
