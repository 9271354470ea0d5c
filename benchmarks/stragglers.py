"""Checks that reports name slow ranks: `python -m benchmarks.stragglers`.

Jobs have 4 ranks and steps of 20 ms. In most trials one random rank is slowed by about
5 %: the rank is stopped for 20 ms in each 200 ms (half of which is in a sleep, which
continues), or its input needs a millisecond more. In other trials the rank is slowed by
more, because three processes use its core while the other ranks share a core, or no
rank is slowed. Counts how often `ringrun --report` named the slow rank, after how long,
and whether it ever named another rank.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 4
EVERY = 10  # seconds between two reports
LONGEST = 31.0  # most seconds of a trial
KINDS = ("pulses", "competitor", "input", "none")

RANK = """
import os, sys, time
import numpy as np
import ringjax
from ringjax import eager

kind, victim = sys.argv[1], int(sys.argv[2])
ringjax.init()
mine = ringjax.rank() == victim
if kind == "competitor":
    os.sched_setaffinity(0, {0} if mine else {1})
open(f"{sys.argv[3]}/{ringjax.rank()}", "w").write(str(os.getpid()))

# Ranks that want more than there are cores are late by chance, all of them.
busy = 0.003 if kind == "competitor" else 0.0003

def load():
    # The input: what the step waits for.
    time.sleep(0.019 - busy + (0.001 if mine and kind == "input" else 0))

def work():
    end = time.thread_time() + busy
    while time.thread_time() < end:
        pass

gradients = np.ones(1 << 16, np.float32)
while True:
    load()
    work()
    eager.allreduce(gradients, name="gradients", out=gradients)
"""


def trial(kind: str, victim: int) -> tuple[float | None, list[int]]:
    """Runs a trial; returns seconds until the slow rank was named, and other names."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-P", "-m", "ringjax.run", "-np", str(RANKS)]
        words += ["--report", str(EVERY), sys.executable, "-c", RANK, kind]
        log = Path(folder) / "log"
        with log.open("wb") as file:
            job = subprocess.Popen(
                [*words, str(victim), folder], stderr=file, stdout=subprocess.DEVNULL
            )
        hogs: list[subprocess.Popen[bytes]] = []
        try:
            pids = _pids(Path(folder))
            if kind == "competitor":
                code = "import os\nos.sched_setaffinity(0, {0})\nwhile True: pass"
                # One for each healthy rank; the healthy ranks share the other core.
                words = [sys.executable, "-c", code]
                hogs = [subprocess.Popen(words) for _ in range(RANKS - 1)]
            return _watch(log, victim, pids[victim] if kind == "pulses" else None)
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
            job.send_signal(signal.SIGTERM)
            try:
                job.wait(20)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()


def _pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        files = [folder / str(rank) for rank in range(RANKS)]
        texts = [file.read_text() if file.exists() else "" for file in files]
        if all(texts):
            return [int(text) for text in texts]
        time.sleep(0.1)  # no event reports that other processes have made their files
    raise RuntimeError("the job has not begun")


def _watch(
    log: Path, victim: int, stopped: int | None
) -> tuple[float | None, list[int]]:
    began = time.monotonic()
    named, others = None, []
    while named is None and time.monotonic() - began < LONGEST:
        time.sleep(0.18)  # the part of each 200 ms in which the rank runs
        if stopped is not None:
            os.kill(stopped, signal.SIGSTOP)
            time.sleep(0.02)  # the part of each 200 ms in which the rank is stopped
            os.kill(stopped, signal.SIGCONT)
        found = re.findall(
            r"^.* (\d+)  .*<- all wait for it", log.read_text(), re.MULTILINE
        )
        others = [int(rank) for rank in found if int(rank) != victim]
        if str(victim) in found:
            named = time.monotonic() - began
    return named, others


def main() -> None:
    """Runs the trials; prints a line for each way to slow a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    print("slowed by, trials, named it, named another, seconds (median, most)")
    for kind in options.kinds:
        victims = [draw.randrange(RANKS) for _ in range(options.trials)]
        if kind == "none":
            victims = [-1] * options.trials
        found = [trial(kind, victim) for victim in victims]
        times = [seconds for seconds, _ in found if seconds is not None] or [0.0]
        wrong = sum(bool(others) for _, others in found)
        named = sum(seconds is not None for seconds, _ in found)
        print(
            f"{kind}, {len(found)}, {named}, {wrong}, "
            f"{statistics.median(times):.1f}, {max(times):.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
