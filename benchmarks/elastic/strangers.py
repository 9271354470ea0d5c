"""The cost of hostile connections for a job: `python -m benchmarks.elastic.strangers`.

Strangers connect to every port of a static job that trains, in turns with times without
strangers. tests/support/strangers.py describes what strangers do. They run on this
machine at the lowest priority, so the numbers include their CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from support.launch import Job  # noqa: E402

TRAIN = """
import json, sys, time
import jax, jax.numpy as jnp
import ringjax
ringjax.init()
x = jnp.ones(1 << 18, jnp.float32)
step = jax.jit(lambda x: ringjax.allreduce(jnp.tanh(x), op=ringjax.Average))
with open(sys.argv[1] + f"/{ringjax.rank()}", "w", buffering=1) as file:
    while True:
        for _ in range(20):
            step(x).block_until_ready()
        file.write(f"{time.monotonic()}\\n")
"""
DISTURB = """
import sys
from support import strangers
print(strangers.disturb(*sys.argv[1:3], *map(float, sys.argv[3:])))
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints steps per second without and with strangers, and what strangers did."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic.strangers")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one turn")
    parser.add_argument("--rate", type=float, default=200, help="connections a second")
    options = parser.parse_args(arguments)
    rates: dict[str, list[float]] = {"alone": [], "disturbed": []}
    visits = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program, lines = folder / "train.py", folder / "0"
        program.write_text(TRAIN)
        words = [sys.executable, str(program), name]
        job = Job(2, words, Path(tempfile.mkdtemp(dir=name)), {"RINGJAX_SHM": "0"})
        with contextlib.closing(job.start()):
            while not lines.exists() or len(lines.read_text().splitlines()) < 20:
                if job.poll() is not None:
                    raise RuntimeError(job.logs())
                time.sleep(0.1)  # no event reports that the ranks have written lines
            for _ in range(options.turns):
                rates["alone"].append(rate(lines, options.seconds))
                strangers = disturb(
                    job.id, name_of(job.rank_pid(0)), options.seconds + 1, options.rate
                )
                time.sleep(0.5)  # the program that connects starts meanwhile
                rates["disturbed"].append(rate(lines, options.seconds))
                visits += int(strangers.communicate()[0])
                if job.poll() is not None:
                    raise RuntimeError(job.logs())
    alone, disturbed = (statistics.median(found) for found in rates.values())
    print(
        f"{alone:.0f} steps a second without strangers, {disturbed:.0f} with", end=" "
    )
    print(f"{visits / options.turns / (options.seconds + 1):.0f} connections a second:")
    print(f"{100 * (disturbed / alone - 1):+.1f} %")
    print(json.dumps(rates))


def rate(lines: Path, seconds: float) -> float:
    before = len(lines.read_text().splitlines())
    time.sleep(seconds)
    times = [float(line) for line in lines.read_text().splitlines()[before:]]
    return 20 * (len(times) - 1) / (times[-1] - times[0])


def disturb(job: str, name: str, seconds: float, rate: float) -> subprocess.Popen[str]:
    """Runs the strangers in a process of their own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    words = ["nice", "-n", "19", sys.executable, "-c", DISTURB]
    return subprocess.Popen(
        [*words, job, name, str(seconds), str(rate)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def name_of(pid: int) -> str:
    """Returns the id of a rank's job, which every user of the host may read."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (found,) = [v for v in variables if v.startswith(b"RINGJAX_JOB=")]
    return found.partition(b"=")[2].decode()


if __name__ == "__main__":
    main()
