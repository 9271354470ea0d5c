"""What a failure costs, and readiness for one: `python -m benchmarks.elastic.recovery`.

Kills: from kill -9 of a random worker to the next step that each survivor completes,
and how long all stand still when its replacement joins. Overhead: the same program in a
static and in an elastic job, in turns, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.elastic.soak import Chaos, jobs, summary

PROGRAM = Path(__file__).with_name("recovery_rank.py")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic.recovery")
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5, help="of the overhead; 0: none")
    parser.add_argument(
        "--hosts", type=int, default=1, help="of the overhead; 2: over loopback TCP"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.kills:
        kills(options.np, options.kills, options.seed)
    if options.turns:
        overhead(options.turns, options.np, options.hosts)


def kills(np: int, count: int, seed: int) -> None:
    """Kills one worker after the other, each once its predecessor is replaced."""
    chance = random.Random(seed)
    with (
        tempfile.TemporaryDirectory(prefix="ringjax-kills-") as name,
        jobs(name) as start,
    ):
        folder = Path(name, "traces")
        folder.mkdir()
        chaos = Chaos(start, folder, np)
        for _ in range(count):
            training = chaos.wait_for(np)
            time.sleep(chance.uniform(0.05, 0.5))
            worker = chance.choice(sorted(training))
            chaos.do("kill", worker, training[worker], chance)
            chaos.wait_for_steps(5)
        verdict = chaos.end()
    print(f"{np} workers, {count} kills, {verdict.steps} steps, each as in one process")
    for what, samples in (
        ("from kill -9 to a survivor's next step", verdict.recoveries),
        ("standstill for a newcomer", verdict.pauses),
    ):
        print(summary(what, [1e3 * s for s in samples]))


def overhead(turns: int, np: int, hosts: int) -> None:
    """The medians of a static and an elastic job, each the median of all turns."""
    found: dict[str, list[dict[str, float]]] = {"static": [], "elastic": []}
    for _ in range(turns):
        for kind, words in (("static", []), ("elastic", ["--min-np", "1"])):
            found[kind].append(_measured(np, hosts, words))
    print(f"{np} ranks, {hosts} hosts, {turns} turns; differences: quartiles of turns")
    print(f"{'':28}{'static':>12}{'elastic':>12}   difference")
    for what in found["static"][0]:
        static, elastic = ([turn[what] for turn in found[kind]] for kind in found)
        before, after = statistics.median(static), statistics.median(elastic)
        share = 100 * (after / before - 1)
        apart = sorted(e - s for s, e in zip(static, elastic, strict=True))
        low, high = apart[len(apart) // 4], apart[(3 * len(apart)) // 4]
        print(
            f"{what:28}{before:9.2f} us{after:9.2f} us {share:+8.1f} %"
            f"   {low:+.2f} to {high:+.2f} us"
        )


def _measured(np: int, hosts: int, options: Sequence[str]) -> dict[str, float]:
    words = list(options)
    if hosts > 1:  # two names of this machine
        words += ["-H", f"localhost:{np - np // 2},127.0.0.1:{np // 2}"]
    with tempfile.TemporaryDirectory() as name, jobs(name) as start:
        job = start(np, [sys.executable, str(PROGRAM)], options=words)
        code = job.wait(300)
        if code != 0:
            raise RuntimeError(f"the job ended with {code}\n{job.logs()}")
        text = job.output(0)
    found: Any = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return {str(what): float(value) for what, value in found.items()}


if __name__ == "__main__":
    main()
