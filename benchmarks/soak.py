"""Hours of chaos: `python -m benchmarks.soak --hours 8`, or `make soak`.

Workers of an elastic job are killed, frozen and sent away at random moments while it
trains; at the end all steps are computed again in one process (tests/chaos.py). Prints
a line a minute and, at the end, how long recoveries took.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from chaos import Chaos, Verdict, quantile  # noqa: E402
from launch import Job, StartJob  # noqa: E402

EDGES = (10, 20, 50, 100, 200, 300, 500, 1000, 2000, 5000)  # ms


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs it and says what came out."""
    options = parse(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="ringjax-soak-") as name,
        jobs(name) as start,
    ):
        folder = Path(name, "traces")
        folder.mkdir()
        chaos = Chaos(start, folder, options.np, options.pause)
        chance = random.Random(options.seed)
        chaos.wait_for(options.np)
        end, began = time.monotonic() + options.hours * 3600, time.monotonic()
        while (left := end - time.monotonic()) > 0:
            chaos.rage(chance, min(60.0, left), options.every)
            steps = max(chaos.progress().values())
            minutes = (time.monotonic() - began) / 60
            print(f"{minutes:7.1f} min {len(chaos.deeds):6} deeds {steps:9} steps")
            sys.stdout.flush()
        verdict = chaos.end()
    print(report(verdict, len(chaos.deeds)))
    if options.json:
        Path(options.json).write_text(json.dumps(vars(verdict)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument(
        "--every", type=float, default=3.0, help="seconds between deeds"
    )
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="a file for all samples")
    return parser.parse_args(arguments)


@contextlib.contextmanager
def jobs(folder: str) -> Iterator[StartJob]:
    """Starts jobs as the fixture of the tests does, and ends them."""
    started: list[Job] = []

    def start(
        np: int,
        script: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> Job:
        own = Path(tempfile.mkdtemp(dir=folder))
        started.append(Job(np, script, own, env, options).start())
        return started[-1]

    try:
        yield start
    finally:
        for job in started:
            job.close()


def report(verdict: Verdict, deeds: int) -> str:
    """What a reader wants to know of it."""
    samples = [1e3 * seconds for seconds in verdict.recoveries]
    lines = [
        f"{verdict.steps} steps by {verdict.smallest} to {verdict.largest} workers, "
        f"{deeds} deeds; all steps are those of one process, bit by bit",
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
    """One line for samples in milliseconds."""
    found = ", ".join(
        f"{name} {quantile(samples, share):.0f}"
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    )
    return f"{what}: {found} ms ({len(samples)} samples)"


if __name__ == "__main__":
    main()
