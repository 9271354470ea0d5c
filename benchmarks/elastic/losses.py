"""The cost of a lost replica, next to peers: `python -m benchmarks.elastic.losses`.

Jobs of some replicas train the same model (losses_rank.py), and one process is killed
at a random moment (kill -9). Peers take turns: every round has one job of each peer.
ringrun itself starts another process. For torchft this benchmark immediately starts
another process. A job of plain JAX ends, and is started again. New samples are added to
the samples in the file of --json, so that a campaign may have several parts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from benchmarks.harness import machine
from benchmarks.harness.launchers import PEERS_FOLDER

PROGRAM = Path(__file__).with_name("losses_rank.py")
PROGRESS_LIMIT = 150.0  # seconds until a job that does not progress has failed
STEPS = 30  # steps of all replicas together before the next kill


@dataclass
class Trace:
    """The lines of a process: (monotonic seconds, number, replicas) of its steps."""

    name: str
    pid: int = 0
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    given_up: list[float] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file to which its process may still write."""
        trace = cls(path.stem)
        for line in path.read_text().splitlines(keepends=True):
            match line.split() if line.endswith("\n") else []:
                case ["pid", pid]:
                    trace.pid = int(pid)
                case ["step", number, when, replicas]:
                    trace.steps.append((float(when), int(number), int(replicas)))
                case ["gave-up", when]:
                    trace.given_up.append(float(when))
        return trace


class Job(ABC):
    """A job of a peer, which is ended with this context.

    Args:
      replicas: number of replicas, of `processes` processes with `devices` devices
        each.
      folder: an empty folder.
    """

    processes = devices = 1
    python: str | Path = sys.executable

    def __init__(self, replicas: int, folder: Path) -> None:
        self.replicas, self._folder = replicas, folder
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        for process in self.children.values():
            process.terminate()  # ringrun ends its ranks
        for process in self.children.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @abstractmethod
    def start(self) -> None:
        """Starts the job."""

    def is_prepared(self) -> bool:
        """Returns whether the job has prepared itself for the next loss."""
        return True

    def recover(self, victim: str) -> float | None:
        """Reacts to a kill as an operator; returns the time if the job has ended."""
        return None

    def spawn(self, name: str, words: Sequence[object], **env: object) -> None:
        variables = {
            "LOSSES_FOLDER": self._folder,
            "LOSSES_DEVICES": self.devices,
            "LOSSES_NAME": name,
            "JAX_PLATFORMS": "cpu",
            **env,
        }
        with (self._folder / f"{name}.out").open("wb") as out:
            self.children[name] = subprocess.Popen(
                [str(word) for word in words],
                env={**os.environ, **{k: str(v) for k, v in variables.items()}},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def traces(self) -> list[Trace]:
        """Returns the traces of all processes that the job has had."""
        return [Trace.read(path) for path in self._folder.glob("*.log")]

    def wait_until_prepared(self) -> None:
        deadline = time.monotonic() + PROGRESS_LIMIT
        while not self.is_prepared():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self}: no spare is ready")
            time.sleep(0.05)  # no event reports that the output grows

    def wait_for_steps(self, since: float, steps: int = 1) -> list[Trace]:
        """Waits until all replicas have made so many steps; returns their traces.

        Raises:
          RuntimeError: the steps are not made in time.
        """

        def whole(trace: Trace) -> int:
            return sum(w > since and n == self.replicas for w, _, n in trace.steps)

        deadline = time.monotonic() + PROGRESS_LIMIT
        while time.monotonic() < deadline:
            found = [trace for trace in self.traces() if whole(trace) >= steps]
            if len(found) >= self.replicas * self.processes:
                return found
            time.sleep(0.05)  # no event reports that the files of other processes grow
        said = [path.read_text()[-2000:] for path in self._folder.glob("*.out")]
        raise RuntimeError("\n".join([f"{self}: does not train", *said]))


class Ringjax(Job):
    """A job of ringrun, which replaces lost processes, at once if it has `spares`."""

    def __init__(self, processes: int, devices: int, spares: int, *job: Any) -> None:
        super().__init__(*job)
        self.processes, self.devices = processes, devices
        self._spares, self._kills = spares, 0

    def start(self) -> None:
        words: list[object] = [sys.executable, "-m", "ringjax.run", "-np"]
        words += [self.replicas * self.processes, "--min-np", self.processes]
        words += ["--group-size", self.processes, "--spares", self._spares]
        words += [sys.executable, PROGRAM, "ringjax"]
        self.spawn("ringrun", words, RINGJAX_RECORD_DIR="off")

    def is_prepared(self) -> bool:
        ready = self._spares + self._kills  # each kill has taken one
        lines = (self._folder / "ringrun.out").read_text()
        return not self._spares or lines.count(") is ready") >= ready

    def recover(self, victim: str) -> None:
        self._kills += 1


class Jax(Job):
    """A job of plain JAX, with one program over all devices."""

    devices = 4

    def __init__(self, heartbeat: int, *job: Any) -> None:
        super().__init__(*job)
        self._heartbeat, self._started = heartbeat, 0

    def start(self) -> None:
        port, self._started = machine.free_port(), self._started + 1
        for rank in range(self.replicas):
            self.spawn(
                f"{self._started}-{rank}",
                [self.python, PROGRAM, "jax"],
                LOSSES_RANK=rank,
                LOSSES_SIZE=self.replicas,
                LOSSES_PORT=port,
                LOSSES_HEARTBEAT=self._heartbeat,
            )

    def recover(self, victim: str) -> float | None:
        deadline = time.monotonic() + PROGRESS_LIMIT
        for process in self.children.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        ended = time.monotonic()
        self.children.clear()
        self.start()
        return ended


class Torchft(Job):
    """A job of torchft: a lighthouse, and a process for each replica."""

    python = PEERS_FOLDER / "torchft" / "bin" / "python"

    def __init__(self, lighthouse: str, *job: Any) -> None:
        super().__init__(*job)
        self._lighthouse, self._port = lighthouse, machine.free_port()

    def start(self) -> None:
        server = Path(self.python).with_name("torchft_lighthouse")
        words = ["--min_replicas", 1, "--bind", f"[::]:{self._port}"]
        self.spawn("lighthouse", [server, *words, *self._lighthouse.split()])
        for replica in range(self.replicas):
            self._spawn(f"1-{replica}")

    def _spawn(self, name: str) -> None:
        where = f"http://127.0.0.1:{self._port}"
        rank = name.rsplit("-", 1)[1]
        words = [self.python, PROGRAM, "torchft"]
        self.spawn(name, words, LOSSES_RANK=rank, TORCHFT_LIGHTHOUSE=where)

    def recover(self, victim: str) -> None:
        self.children.pop(victim).wait()
        times, rank = victim.split("-")
        self._spawn(f"{int(times) + 1}-{rank}")


# The options of torchft's README, and the shortest that work, because a manager
# sends a heartbeat every 100 ms.
USUAL = "--quorum_tick_ms 100 --join_timeout_ms 10000"
QUICK = "--quorum_tick_ms 10 --join_timeout_ms 100 --heartbeat_timeout_ms 500"
PEERS: dict[str, Callable[[int, Path], Job]] = {
    "ringjax, 4 devices": partial(Ringjax, 1, 4, 0),
    "ringjax, 1 device": partial(Ringjax, 1, 1, 0),
    "ringjax, 1 device, a spare": partial(Ringjax, 1, 1, 1),
    "ringjax, groups of 2 x 2": partial(Ringjax, 2, 2, 0),
    "torchft": partial(Torchft, USUAL),
    "torchft, quick": partial(Torchft, QUICK),
    "jax, 4 devices": partial(Jax, 100),
    "jax, 4 devices, quick": partial(Jax, 10),
}
# Jobs of one device show what a spare saves. They are no comparison with peers.
USUAL_PEERS = [name for name in PEERS if "1 device" not in name]


def lose(job: Job, rng: random.Random) -> dict[str, float | None]:
    """Kills a process of a job that trains; returns the costs in seconds."""
    job.wait_until_prepared()
    began = time.monotonic()
    training = job.wait_for_steps(began, STEPS)
    time.sleep(rng.uniform(0.05, 0.5))  # the kill may happen at any moment of a step
    victim = rng.choice(training)
    kill = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    ended = job.recover(victim.name)
    whole = job.wait_for_steps(kill)
    time.sleep(0.5)  # the traces then contain steps after the recovery
    traces = {trace.name: trace for trace in job.traces()}
    before = [when for when, _, _ in traces[victim.name].steps if began < when < kill]
    back = max(
        min(w for w, _, n in traces[t.name].steps if w > kill and n == job.replicas)
        for t in whole
    )
    found = {
        "steps a second": (len(before) - 1) / (before[-1] - before[0]),
        "whole again": back - kill,
        "ended": None if ended is None else ended - kill,
        "next step": None,
        "given up": None,
        "standstill": None,
    }
    stayed = [traces[t.name] for t in training if traces[t.name].steps[-1][0] > back]
    if not stayed:
        return found
    late = max(
        min(w for w, _, n in t.steps if w > kill and n < job.replicas) for t in stayed
    )
    found["next step"] = late - kill
    found["given up"] = max(sum(kill < w < late for w in t.given_up) for t in stayed)
    gaps = [0.0]
    for trace in stayed:
        times = [when for when, _, _ in trace.steps if late <= when]
        gaps += [b - a for a, b in itertools.pairwise(times)]
    found["standstill"] = max(gaps)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic.losses")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=1, help="in a round, of a peer")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=USUAL_PEERS)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, help="samples are added to this file")
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    samples: dict[str, list[dict[str, float | None]]] = {}
    if options.json and options.json.exists():
        samples = json.loads(options.json.read_text())
    for _ in range(options.rounds):
        for replicas in options.replicas:
            for name in options.peers:
                found = samples.setdefault(f"{replicas} x {name}", [])
                with (
                    tempfile.TemporaryDirectory(prefix="ringjax-losses-") as folder,
                    PEERS[name](replicas, Path(folder)) as job,
                ):
                    for _ in range(options.kills):
                        found.append(lose(job, rng))
                        if options.json:
                            options.json.write_text(json.dumps(samples))
    print(table(samples))


def table(samples: dict[str, list[dict[str, float | None]]]) -> str:
    """Formats medians over kills, with the range in brackets, and the p99."""
    lines = []
    for name, found in sorted(samples.items()):
        lines.append(f"{name}, {len(found)} kills")
        for what in found[0]:
            values = sorted(v for one in found if (v := one[what]) is not None)
            if values:
                rest = (
                    f"p99 {values[min(len(values) - 1, int(0.99 * len(values)))]:.3f}"
                )
                lines.append(
                    f"  {what:16}{statistics.median(values):9.3f}"
                    f"  [{values[0]:.3f}, {values[-1]:.3f}]  {rest}"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
