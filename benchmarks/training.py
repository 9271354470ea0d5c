"""Training steps in PyTorch and Keras, next to peers: `python -m benchmarks.training`.

Each network is trained by every rank alone and by all ranks together, in turns. The
difference is the communication that the backward pass does not hide. A second table has
only ResNet-50's gradients, all submitted together. README.md explains both tables.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import session, shapes, torch_networks
from benchmarks.harness.options import add_measurement_options, parse_ranks
from benchmarks.harness.report import columns, ratios, spread
from benchmarks.harness.turns import Case
from benchmarks.peers.table import PEERS

OURS = "ringjax-torch"
USUAL = (OURS, "torch-gloo", "horovod")
NAMES = [name for name, entry in PEERS.items() if entry.kind.trainings]
Row = dict[str, Any]


def rounds_of(row: Row) -> list[float]:
    """Returns the median of each round, in milliseconds."""
    return [statistics.median(batches) / 1e3 for batches in row["rounds_us"]]


def step_table(rows: Sequence[Row]) -> str:
    """Formats milliseconds of a step: alone, together, and the difference (`more`)."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["peer"], {})[row["variant"]] = row
    whole = {
        peer: tuple(rounds_of(pair[variant]) for variant in ("alone", "together"))
        for peer, pair in found.items()
        if len(pair) == 2
    }
    more = {
        peer: [b - a for a, b in zip(*pair, strict=False)]
        for peer, pair in whole.items()
    }
    head = "ms,alone,together,more,step / ours,more / ours,more CPU"
    lines = [head.split(",")]
    for peer, (alone, together) in whole.items():
        step = share = "-"
        if OURS in whole:
            step = spread(ratios(together, whole[OURS][1]), 2)
            # Differences of single rounds are too small to be divided by each other.
            median = statistics.median(more[OURS])
            share = f"{statistics.median(more[peer]) / median:.2f}"
        cpu = found[peer]["together"]["cpu_us"] - found[peer]["alone"]["cpu_us"]
        times = map(spread, (alone, together, more[peer]))
        lines.append([peer, *times, step, share, f"{cpu / 1e3:.1f}"])
    return columns(lines)


def gradient_table(rows: Sequence[Row]) -> str:
    """Formats milliseconds for gradients that are all submitted together."""
    ours = next((rounds_of(row) for row in rows if row["peer"] == OURS), None)
    lines = [["ms", "all at once", "/ ours", "CPU"]]
    for row in rows:
        mine = rounds_of(row)
        against = spread(ratios(mine, ours), 2) if ours else "-"
        name, cpu = f"{row['peer']}: {row['variant']}", row["cpu_us"] / 1e3
        lines.append([name, spread(mine), against, f"{cpu:.1f}"])
    return columns(lines)


def cases(options: argparse.Namespace, ranks: int) -> list[Case]:
    """Returns a case for each network, and a case for the gradients alone."""
    del ranks
    found = []
    for name in options.networks:
        tensors = torch_networks.shapes(name)
        numbers = shapes.count(tensors) / 1e6
        title = f"a step of {name}: {len(tensors)} tensors, {numbers:.1f} M numbers"
        found.append(Case(title, tensors, "trainings", network=name))
    if options.gradients:
        tensors = shapes.resnet50()
        title = f"the {len(tensors)} gradients of ResNet-50, float32, mean"
        found.append(Case(title, tensors, "models"))
    return found


def show(case: Case, ranks: int, rows: Sequence[Row]) -> None:
    table = step_table if case.network else gradient_table
    print(f"\n{ranks} ranks: {case.title}\n{table(rows)}", flush=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="benchmarks.training",
        description="Training with ringjax, DDP over Gloo, and Horovod.",
    )
    p.add_argument("-np", dest="ranks", type=parse_ranks, default=[2])
    p.add_argument("--peers", nargs="+", choices=NAMES, default=list(USUAL))
    networks = torch_networks.NETWORKS
    p.add_argument(
        "--networks",
        nargs="*",
        choices=networks,
        default=["resnet50", "transformer"],
        help="keras-… trains `dense` only",
    )
    p.add_argument("--no-gradients", dest="gradients", action="store_false")
    add_measurement_options(p, "training")
    p.set_defaults(seconds=1.0)
    options = p.parse_args(words)
    if options.rounds < 1:
        p.error("--rounds must be 1 or more")
    options.python, options.dtype = dict(options.python), ["float32"]
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    _, complete = session.run(options, cases, show)
    session.finish(options, complete)


if __name__ == "__main__":
    main()
