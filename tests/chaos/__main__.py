"""A soak test: `python -m chaos --hours 8` in tests/, or `make soak`.

While an elastic job trains, the test kills, freezes and slows workers and asks them to
leave at random moments, and unrelated programs connect to the ports of the job. At the
end, faults.py computes all steps again in one process, and support/growth.py reports
processes whose memory or descriptors have grown. Growth needs minutes to show, so one
worker at a time is protected from faults. The program prints a line each minute and, at
the end, the durations of recoveries.
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

from chaos.faults import EAGER_PROGRAM, PROGRAM, ChaosJob, CheckResult, quantile

SLOTS = 2000  # slots of the host; a worker that leaves does not return its slot
PROTECTION_SECONDS = 300.0  # how long one worker is protected from faults
MEASURE_INTERVAL = 10.0  # seconds between two measurements of memory and descriptors
HISTOGRAM_BINS = (10, 20, 50, 100, 200, 300, 500, 1000, 2000, 5000)  # upper ends in ms


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the soak test, prints its report, and exits with an error at growth."""
    options = parse(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="ringjax-soak-") as name,
        contextlib.closing(Jobs(lambda: Path(tempfile.mkdtemp(dir=name)))) as jobs,
    ):
        folder = Path(tempfile.mkdtemp(dir=name))
        program = EAGER_PROGRAM if options.program == "eager" else PROGRAM
        chaos = ChaosJob(
            *(jobs.start, folder, options.np, options.pause),
            options=["--spares", str(options.spares)],
            program=program,
            slots=SLOTS,
        )
        growth = inject_faults(chaos, options)
        result = chaos.end()
    failures = chaos.failures()
    print(report(result, chaos.counts(), failures))
    print("\n".join(growth.report()))
    if grown := growth.leaks():
        raise SystemExit("\n".join(grown))
    if options.json:
        Path(options.json).write_text(json.dumps(vars(result)))


def inject_faults(chaos: ChaosJob, options: argparse.Namespace) -> GrowthMonitor:
    """Injects faults for `--hours`, or until `--failures` workers have failed."""
    rng = random.Random(options.seed)
    growth = GrowthMonitor(chaos.job.id, peers=options.np - 1)
    chaos.wait_for_workers(options.np)
    end, began = time.monotonic() + options.hours * 3600, time.monotonic()
    printed = chosen = began
    protected = min(chaos.training(), default=0)
    while (left := end - time.monotonic()) > 0:
        chaos.inject_faults(
            rng, min(MEASURE_INTERVAL, left), options.every, [protected]
        )
        growth.take_samples()
        failures = chaos.failures()
        if time.monotonic() - chosen > PROTECTION_SECONDS:
            chosen, protected = time.monotonic(), rng.choice(sorted(chaos.pids()))
        if time.monotonic() - printed >= 60:
            printed = time.monotonic()
            steps = max(chaos.progress().values())
            minutes = (printed - began) / 60
            print(f"{minutes:7.1f} min {failures:6} failures {steps:9} steps")
            sys.stdout.flush()
        if 0 < options.failures <= failures:
            break
    chaos.wait_for_workers(options.np)
    chaos.wait_for_steps(20)
    growth.take_samples()
    return growth


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--spares", type=int, default=0, help="as for ringrun")
    parser.add_argument(
        "--every", type=float, default=3.0, help="mean seconds between faults"
    )
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step")
    parser.add_argument(
        "--failures", type=int, default=0, help="also end after so many failed workers"
    )
    parser.add_argument(
        "--program",
        choices=("jax", "eager"),
        default="jax",
        help="eager: NumPy only, so that new workers start sooner",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="a file for all samples")
    return parser.parse_args(arguments)


def report(result: CheckResult, faults: Mapping[str, int], failures: int) -> str:
    """Formats the failures, the steps, and the durations of recoveries."""
    samples = [1e3 * seconds for seconds in result.recoveries]
    lines = [
        f"{failures} failures: {faults}",
        f"{result.steps} steps by {result.smallest} to {result.largest} workers; "
        "all steps equal those of one process, bit for bit",
        summary("from kill -9 to a survivor's next step", samples),
        summary("pause for a newcomer", [1e3 * s for s in result.pauses]),
    ]
    low = 0
    for high in HISTOGRAM_BINS:
        count = sum(low <= sample < high for sample in samples)
        lines.append(f"  {low:5} to {high:5} ms {count:6} {'#' * min(count, 60)}")
        low = high
    return "\n".join(lines)


def summary(title: str, samples: list[float]) -> str:
    found = ", ".join(
        f"{name} {quantile(samples, share):.0f}"
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    )
    return f"{title}: {found} ms ({len(samples)} samples)"


if __name__ == "__main__":
    main()
