"""A soak test: `python -m chaos --hours 8` in tests/, or `make soak`.

Workers of an elastic job are killed, frozen, slowed and asked to leave at random
moments while the job trains, and strangers connect to its ports. At the end all steps
are computed again in one process (deeds.py), and no process may have grown
(support/growth.py). To measure growth, one worker at a time is not disturbed for some
minutes. The program prints a line each minute and, at the end, the durations of
recoveries.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.growth import GrowthMonitor
from support.launch import Jobs

from chaos.deeds import EAGER, PROGRAM, Chaos, Verdict, quantile

SEATS = 2000  # slots of the host; a worker that leaves does not return its slot
PEACE = 300.0  # seconds for which one worker is not disturbed
PART = 10.0  # seconds between two measurements of memory and descriptors
EDGES = (10, 20, 50, 100, 200, 300, 500, 1000, 2000, 5000)  # bucket ends in ms


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the soak test and prints the report."""
    options = parse(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="ringjax-soak-") as name,
        contextlib.closing(Jobs(lambda: Path(tempfile.mkdtemp(dir=name)))) as jobs,
    ):
        folder = Path(tempfile.mkdtemp(dir=name))
        program = EAGER if options.program == "eager" else PROGRAM
        chaos = Chaos(
            jobs.start, folder, options.np, options.pause, program=program, seats=SEATS
        )
        growth = rage(chaos, options)
        verdict = chaos.end()
    failures = chaos.failures()
    print(report(verdict, chaos.counts(), failures))
    print("\n".join(growth.report()))
    if grown := growth.leaks():
        raise SystemExit("\n".join(grown))
    if options.json:
        Path(options.json).write_text(json.dumps(vars(verdict)))


def rage(chaos: Chaos, options: argparse.Namespace) -> GrowthMonitor:
    """Disturbs the job for some hours, or until a number of failures."""
    chance = random.Random(options.seed)
    growth = GrowthMonitor(chaos.job.id, peers=options.np - 1)
    chaos.wait_for(options.np)
    end, began = time.monotonic() + options.hours * 3600, time.monotonic()
    said = chosen = began
    spared = min(chaos.training(), default=0)
    while (left := end - time.monotonic()) > 0:
        chaos.rage(chance, min(PART, left), options.every, [spared])
        growth.take_samples()
        failures = chaos.failures()
        if time.monotonic() - chosen > PEACE:
            chosen, spared = time.monotonic(), chance.choice(sorted(chaos.pids()))
        if time.monotonic() - said >= 60:
            said = time.monotonic()
            steps = max(chaos.progress().values())
            minutes = (said - began) / 60
            print(f"{minutes:7.1f} min {failures:6} failures {steps:9} steps")
            sys.stdout.flush()
        if 0 < options.failures <= failures:
            break
    chaos.wait_for(options.np)
    chaos.wait_for_steps(20)
    growth.take_samples()
    return growth


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument(
        "--every", type=float, default=3.0, help="seconds between deeds"
    )
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step")
    parser.add_argument(
        "--failures", type=int, default=0, help="end after so many, not only by time"
    )
    parser.add_argument(
        "--program",
        choices=("jax", "eager"),
        default="jax",
        help="eager: numpy only, so that newcomers come sooner",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="a file for all samples")
    return parser.parse_args(arguments)


def report(verdict: Verdict, deeds: Mapping[str, int], failures: int) -> str:
    """Formats the failures, the steps, and the durations of recoveries."""
    samples = [1e3 * seconds for seconds in verdict.recoveries]
    lines = [
        f"{failures} failures: {deeds}",
        f"{verdict.steps} steps by {verdict.smallest} to {verdict.largest} workers; "
        "all steps are those of one process, bit by bit",
        summary("from kill -9 to a survivor's next step", samples),
        summary("standstill for a newcomer", [1e3 * s for s in verdict.pauses]),
    ]
    low = 0
    for high in EDGES:
        count = sum(low <= sample < high for sample in samples)
        lines.append(f"  {low:5} to {high:5} ms {count:6} {'#' * min(count, 60)}")
        low = high
    return "\n".join(lines)


def summary(what: str, samples: list[float]) -> str:
    found = ", ".join(
        f"{name} {quantile(samples, share):.0f}"
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    )
    return f"{what}: {found} ms ({len(samples)} samples)"


if __name__ == "__main__":
    main()
