"""Runs the examples on one rank, as a user runs them, and checks that they learn.

Speeds are shown as the examples print them, without a target.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.report import Report
from benchmarks.gpu.section import section

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT = 40  # time limit of an example in seconds


@dataclass(frozen=True)
class Example:
    """A script, its arguments, a number to look for in its output, and its bound.

    A negative bound means "at most" its absolute value.
    """

    script: str
    words: tuple[str, ...]
    pattern: str
    bound: float


RUNS = (
    Example("jax_digits.py", ("--epochs", "12"), r"test +([\d.]+)%", 95.0),
    Example(
        "jax_char_lm.py",
        ("--steps", "150", "--sample", "8"),
        r"test +([\d.]+) bits/char",
        -3.6,
    ),
)


def try_example(report: Report, example: Example) -> None:
    """Runs one example and checks the number in its output."""
    command = [sys.executable, "-P", str(EXAMPLES / example.script), *example.words]
    name = " ".join([example.script, *example.words])
    print(f"== {name}", flush=True)
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired as late:
        print(late.stdout, late.stderr, flush=True)
        report.row(name, "-", "-", f"{LIMIT}", f"still ran after {LIMIT} s")
        report.fail(f"{name}: still ran after {LIMIT} s")
        return
    seconds = f"{time.monotonic() - started:.1f}"
    print(done.stdout, done.stderr, flush=True)
    found = re.findall(example.pattern, done.stdout)
    bound = f"{'≥' if example.bound > 0 else '≤'} {abs(example.bound):g}"
    value = float(found[-1]) if found else float("nan")
    good = value >= example.bound if example.bound > 0 else value <= -example.bound
    good = good and done.returncode == 0
    said = done.stdout.strip().splitlines() or ["nothing"]
    speeds = re.findall(r"[\d,]+ (?:images|characters)/s", done.stdout)
    shown = speeds[-1] if speeds else "-"
    report.row(name, f"{value:g}", bound, seconds, shown, "ok" if good else "FAILED")
    if not good:
        last = (done.stderr.strip().splitlines() or said)[-1]
        report.fail(f"{name}: exit code {done.returncode}, {value:g}: {last[:300]}")


def main() -> None:
    with section() as report:
        report.table(
            "Examples, one rank", "example", "reached", "bound", "s", "says", "result"
        )
        for example in RUNS:
            try_example(report, example)


if __name__ == "__main__":
    main()
