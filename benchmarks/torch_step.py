"""Training in PyTorch with ringjax, DDP and Horovod: `python -m benchmarks.torch_step`.

Steps of real networks, alone and together, in turns; what is more in one of the second
kind is communication, as much of it as the backward pass does not hide. And ResNet-50's
gradients by themselves, all at once. How to read the tables: README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import report, shapes, torch_networks
from benchmarks.harness.options import parse_python, parse_ranks
from benchmarks.harness.report import ratios, spread
from benchmarks.harness.session import start
from benchmarks.harness.turns import Case, Quiet, measure
from benchmarks.harness.worlds import World, close_when_terminated

PEERS = ("ringjax-torch", "torch-gloo", "horovod")
OURS = PEERS[0]
Row = dict[str, Any]
Rounds = list[float]  # of every round the median, in milliseconds


def rounds_of(row: Row) -> Rounds:
    return [statistics.median(batches) / 1e3 for batches in row["rounds_us"]]


def step_table(title: str, rows: Sequence[Row]) -> str:
    """Milliseconds of a step: alone, together, the difference."""
    found: dict[str, dict[str, Rounds]] = {}
    work: dict[str, dict[str, float]] = {}  # CPU milliseconds of a rank in a step
    for row in rows:
        found.setdefault(row["peer"], {})[row["variant"]] = rounds_of(row)
        work.setdefault(row["peer"], {})[row["variant"]] = row["cpu_us"] / 1e3
    whole = {p: v for p, v in found.items() if {"alone", "together"} <= v.keys()}
    more = {
        peer: [b - a for a, b in zip(v["alone"], v["together"], strict=False)]
        for peer, v in whole.items()
    }
    head = f"{'ms':16} {'alone':>24} {'together':>24} {'more':>24}"
    head += f" {'step / ours':>20} {'more / ours':>12} {'more CPU':>10}"
    lines = [f"\n{title}", head]
    for peer, variants in whole.items():
        cells = [spread(v) for v in (variants["alone"], variants["together"])]
        cells.append(spread(more[peer]))
        against = ["-", "-"]
        if OURS in whole:
            together = ratios(variants["together"], whole[OURS]["together"])
            # Differences of single rounds are too small to be divided by each other.
            share = statistics.median(more[peer]) / statistics.median(more[OURS])
            against = [spread(together, 2), f"{share:.2f}"]
        lines.append(
            f"{peer:16}"
            + "".join(f" {cell:>24}" for cell in cells)
            + f" {against[0]:>20} {against[1]:>12}"
            + f" {work[peer]['together'] - work[peer]['alone']:>10.1f}"
        )
    return "\n".join(lines)


def gradient_table(title: str, rows: Sequence[Row]) -> str:
    """Milliseconds for gradients that are all there at once."""
    ours = [rounds_of(row) for row in rows if row["peer"] == OURS]
    head = f"{'ms':44} {'all at once':>24} {'/ ours':>20} {'CPU':>8}"
    lines = [f"\n{title}", head]
    for row in rows:
        mine = rounds_of(row)
        against = spread(ratios(mine, ours[0]), 2) if ours else "-"
        name = f"{row['peer']}: {row['variant']}"
        work = row["cpu_us"] / 1e3
        lines.append(f"{name:44} {spread(mine):>24} {against:>20} {work:>8.1f}")
    return "\n".join(lines)


Show = Callable[[str, Sequence[Row]], str]


def cases(options: argparse.Namespace) -> list[tuple[Case, Show]]:
    """What is measured, and how it is shown."""
    found: list[tuple[Case, Show]] = []
    for name in options.networks:
        of = torch_networks.shapes(name)
        numbers = shapes.count(of)
        title = f"a step of {name}: {len(of)} tensors, {numbers / 1e6:.1f} M numbers"
        case = Case(title, of, "trainings", network=name)
        found.append((case, step_table))
    if options.gradients:
        of = shapes.resnet50()
        title = f"the {len(of)} gradients of ResNet-50, float32, mean"
        found.append((Case(title, of, "models"), gradient_table))
    return found


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="benchmarks.torch_step",
        description="Training in PyTorch with ringjax, DDP over Gloo, and Horovod.",
    )
    p.add_argument("-np", dest="ranks", type=parse_ranks, default=[2])
    p.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    networks = torch_networks.NETWORKS
    p.add_argument("--networks", nargs="*", choices=networks, default=list(networks))
    p.add_argument("--no-gradients", dest="gradients", action="store_false")
    p.add_argument("--rounds", type=int, default=9, help="turns of every variant (9)")
    p.add_argument("--seconds", type=float, default=1.0, help="of one turn (1)")
    p.add_argument("--quiet", type=float, default=0.0, metavar="SECONDS")
    p.add_argument(
        "--python", nargs="+", type=parse_python, default=[], metavar="PEER=PYTHON"
    )
    path = Path("build/benchmarks/torch_step.json")
    p.add_argument("--json", type=Path, default=path)
    options = p.parse_args(words)
    if options.rounds < 1:
        p.error("--rounds must be 1 or more")
    options.python, options.dtype = dict(options.python), ["float32"]
    return options


def compare(ranks: int, options: argparse.Namespace) -> list[Row]:
    print(f"\n# {ranks} ranks, {options.rounds} rounds", flush=True)
    rows: list[Row] = []
    worlds: list[World] = []
    with tempfile.TemporaryDirectory(prefix="ringjax-torch-") as folder:
        try:
            worlds = start(ranks, options, Path(folder))
            quiet = Quiet(options.quiet)
            for case, show in cases(options):
                found = measure(worlds, case, ranks, options, quiet)
                versions = {world.peer: world.version for world in worlds}
                print(show(case.title, found), flush=True)
                rows += [{**row, "version": versions[row["peer"]]} for row in found]
        finally:
            for world in worlds:
                world.close()
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Runs all cases, prints the tables and writes the JSON file."""
    options = parse(words)
    close_when_terminated()
    about, rows = report.about(), []
    for ranks in options.ranks:
        rows += compare(ranks, options)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(f"\n# written to {options.json}")


if __name__ == "__main__":
    main()
