"""An elastic job on one GPU: a worker is killed, the job continues, a worker joins.

Two ranks share the device, as in ranks.py. The benchmark checks results and measures
recoveries, in which only connecting takes long.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.ranks import LegError, end
from benchmarks.gpu.report import Report
from benchmarks.gpu.section import section

LIMIT = 60.0  # time limit of the section in seconds


class Story:
    """A job of two workers; `lines` has the lines of their output."""

    def __init__(self, folder: Path, limit: float) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self._deadline = folder, time.monotonic() + limit
        job = ["-m", "ringjax.run", "-np", "2", "--min-np", "1", "--max-np", "2"]
        rank = ["-m", "benchmarks.gpu.elastic_rank", str(folder)]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *job, sys.executable, "-P", *rank],
                env=os.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lines(self, event: str) -> dict[int, list[dict[str, Any]]]:
        found = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            text = path.read_text()
            lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
            found[int(path.stem)] = [line for line in lines if line["event"] == event]
        return found

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        """Waits until a condition is true.

        Raises:
          LegError: the condition is not true in time, or the job has ended.
        """
        while not done():
            ended = self.process.poll() is not None and not done()
            if ended or time.monotonic() > self._deadline:
                log = (self.folder / "log").read_text(errors="replace")[-2500:]
                raise LegError(f"never: {what}\n{log}")
            time.sleep(0.02)


def tell(folder: Path, limit: float) -> dict[str, Any]:
    """Returns the seconds of a recovery and of a join, and the results of the ranks.

    Raises:
      LegError: the job did not continue, or has a wrong result.
    """
    story = Story(folder, limit)
    try:

        def steps(worker: int) -> list[dict[str, Any]]:
            return story.lines("step").get(worker, [])

        story.wait("two ranks train", lambda: all(len(steps(w)) > 9 for w in (0, 1)))
        killed = time.monotonic()
        os.kill(story.lines("started")[0][0]["pid"], signal.SIGKILL)

        def alone() -> list[float]:
            return [x["t"] for x in steps(1) if x["workers"] == [1]]

        story.wait("rank 1 goes on without rank 0", lambda: bool(alone()))
        story.wait("another worker joins", lambda: any(map(steps, range(2, 9))))
        newcomer = next(w for w in range(2, 9) if steps(w))
        joined = next(x["t"] for x in steps(1) if newcomer in x["workers"])
        before = max(t for t in alone() if t < joined)
        (folder / "stop").touch()
        story.wait("the job ends", lambda: story.process.poll() is not None)
        if story.process.returncode != 0:
            raise LegError((folder / "log").read_text(errors="replace")[-2500:])
        ends = [line[0] for line in story.lines("finished").values() if line]
        return {
            "recovery": min(alone()) - killed,
            "join": joined - before,
            "ends": ends,
        }
    finally:
        end([story.process])


def check(report: Report, found: dict[str, Any]) -> None:
    """Makes a table, and a failure for each wrong value."""
    ends = found["ends"]
    platforms = "/".join(sorted({line["platform"] for line in ends}))
    report.table(f"An elastic job, 2 ranks on {platforms}", "what", "result")
    report.row("from kill -9 to the next commit", f"{found['recovery']:.2f} s")
    report.row("standstill while a worker joins", f"{found['join']:.2f} s")
    report.row("steps", str(ends[0]["step"]))
    if len(ends) != 2 or len({(e["step"], e["expected"]) for e in ends}) != 1:
        report.fail(f"the ranks did not come to the same end: {ends}")
    if any(line["programs"] != 1 for line in ends):
        report.fail("a step was compiled again for another number of ranks")
    if platforms == "gpu" and not all(line["nccl"] for line in ends):
        report.fail("the ranks computed on the GPU but did not exchange by NCCL")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=LIMIT)
    options = parser.parse_args()
    with section() as report:
        check(report, tell(options.work, options.seconds))


if __name__ == "__main__":
    main()
