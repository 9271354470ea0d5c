"""Cases, and how the peers take turns in a case: bursts, rounds, and results.

Prints only which variants are omitted, and why. report.py makes the tables.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import machine
from benchmarks.harness.shapes import Shapes, count
from benchmarks.harness.worlds import World, WorldError

BURST = 0.005  # least seconds of a burst
BATCHES = 3, 25
BYTES = {"float32": 4, "bfloat16": 2}
COPIES = 2  # copies of its tensors that a variant holds: input, and result or buckets


@dataclass(frozen=True)
class Case:
    """The work that every variant must do.

    Attributes:
      title: the title for people.
      shapes: the shapes of the tensors.
      kind: one of KINDS (adapter.py), for which a peer has its own variants.
      dtype: the dtype of the tensors.
      counts: whether this case is a point of time against the number of tensors.
      network: a network of torch_networks.py, with parameters of these shapes.
      collective: one of COLLECTIVES. The only shape is the shape of the whole vector.
      fresh: whether the input is written again before each call.
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
        """Returns the least bytes over the busiest link for each byte of size."""
        # Streams carry each byte once.
        if self.kind == "streams" or self.collective == "broadcast":
            return 1.0
        times = 2 if self.collective in ("", "allreduce") else 1
        return times * (ranks - 1) / ranks


@dataclass
class Variant:
    """A variant of a peer, and its measurements in one case."""

    world: World
    name: str
    calls: int = 1
    batches: int = BATCHES[0]
    rounds: list[list[float]] = field(default_factory=list)
    wall: float = 0.0
    busy: float = 0.0  # CPU seconds of the machine during the bursts
    own: float = 0.0  # CPU seconds of the ranks and of this process

    def burst(self) -> list[float]:
        """Runs a burst; returns seconds per call of each batch, on the slowest rank."""
        start = _clocks()
        replies = self.world.request(
            do="run", variant=self.name, batches=self.batches, calls=self.calls
        )
        wall, busy, own = (b - a for a, b in zip(start, _clocks(), strict=True))
        self.wall, self.busy = self.wall + wall, self.busy + busy
        self.own += own + sum(a["cpu"] for a in replies)
        return [max(t) for t in zip(*(a["seconds"] for a in replies), strict=True)]

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
        """Returns the seconds of a call in the fastest round, as a median."""
        return min(map(statistics.median, self.rounds))

    def over(self, other: Variant) -> list[float]:
        """Returns the ratio of this time to the time of `other`, in each round."""
        return [
            statistics.median(mine) / statistics.median(theirs)
            for mine, theirs in zip(self.rounds, other.rounds, strict=False)
        ]

    def row(self, case: Case, ranks: int) -> dict[str, Any]:
        """Returns the numbers of this variant, without comparisons."""
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
            # The kernel counts in ticks of 10 ms, so short times are not precise
            # enough.
            "foreign": max(0.0, foreign) if self.wall > 0.2 else None,
            "rounds_us": [[t * 1e6 for t in batches] for batches in self.rounds],
        }


def compare(
    variants: Sequence[Variant], case: Case, ranks: int
) -> list[dict[str, Any]]:
    """Returns the rows of one case, with medians of the ratios in each round.

    `ratio` is the time over the time of ringjax's first variant, `share` is the time of
    the limit's best variant over this variant's time, and `against` is the time of
    every peer's best variant over this variant's time. The best variant has the fastest
    round, so that a busy minute does not change the choice.
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


def variants_that_fit(counts: Sequence[int], size: int, ranks: int, memory: int) -> int:
    """Returns how many variants of each peer memory can hold at the same time."""
    most = max(counts, default=0)
    while most and COPIES * size * ranks * sum(min(most, n) for n in counts) > memory:
        most -= 1
    return most


def variants_for(world: World, case: Case) -> list[str]:
    """Returns the variants of a peer for a case; none if the peer cannot run it."""
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
    """Waits for moments without other work, for `seconds` in all."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def wait(self) -> None:
        """Returns after a quiet quarter of a second, or if no waiting time is left."""
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
    """Measures one case: all variants of all worlds, in turns. Drops failed worlds."""
    asked = [(world, names) for world in worlds if (names := variants_for(world, case))]
    most = variants_that_fit(
        [len(n) for _, n in asked], case.size, ranks, machine.usable_memory()
    )
    if any(len(names) > most for _, names in asked):
        print(f"# only {most} variants of each peer: memory holds no more", flush=True)
    variants: list[Variant] = []
    for world, names in asked:
        found = [Variant(world, name) for name in names[:most]]
        try:
            world.request(
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
        # The order changes, so that neighbours change, too.
        first = turn % max(1, len(variants))
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
    """Returns wall clock, CPU seconds of the machine, and of this process."""
    return time.monotonic(), machine.cpu_seconds(), time.process_time()
