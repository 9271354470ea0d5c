"""Chaos tests: deeds that kill, freeze, slow or disturb workers at random moments.

The workers run eager_program.py, or program.py in tests with XLA. Afterwards `check`
proves that no deed changed the training. It computes every step again in one process,
with the contributions of the same workers, and compares the parameters bit by bit. So
all ranks had equal parameters after every step, no step was lost, done twice or done
with a wrong mean, and no worker contributed after it was declared lost.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import leaks, strangers
from support.launch import Job, StartJob

PROGRAM = Path(__file__).with_name("program.py")
EAGER = Path(__file__).with_name("eager_program.py")  # numpy: workers start fast
# Seconds after which a silent rank is declared lost. On a busy machine where several
# ranks compile, a rank may wait for a core almost as long.
SILENCE = 4.0
SETTINGS = {
    "RINGJAX_FAILURE_TIMEOUT": f"{SILENCE:g}",
    "RINGJAX_HEARTBEAT": "0.2",
    "RINGJAX_TILE_BYTES": "4096",  # small messages use the code for large ones
}


@dataclass(frozen=True)
class Deed:
    """An action on a worker or on all workers.

    "kill", "term" (the worker leaves), "memory" (an allocation fails, which raises an
    exception in the training) and "fence" (the worker is silent for too long) end the
    worker. "freeze", "slow" and "garbage" (strangers connect to all workers) do not.
    """

    at: float
    what: str
    worker: int


@dataclass
class Verdict:
    """The findings of `check`.

    Attributes:
        steps: the number of completed steps.
        recoveries: seconds to the next step, for every kill and every survivor.
        pauses: seconds between two steps of the members, for every worker that joined.
        largest, smallest: the largest and the smallest number of workers in a step.
    """

    steps: int
    recoveries: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    largest: int = 0
    smallest: int = 0


ENDS = ("kill", "term", "memory")


class Chaos:
    """A job whose workers suffer deeds.

    Args:
        start_job: the fixture, or another function that starts a `launch.Job`.
        folder: an empty folder for the traces.
        np: the number of workers at the start, which is also the maximum.
        pause: seconds between two steps.
        env: additional variables for the job.
        options: additional words for ringrun.
        program: the program of the workers.
        seats: the number of slots of the host. ringrun does not use the slot of a
            worker that left again, and waits before it uses the slot of a worker that
            failed early.
        arguments: additional words for the program.
    """

    def __init__(
        self,
        start_job: StartJob,
        folder: Path,
        np: int = 4,
        pause: float = 0.005,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        program: Path = EAGER,
        seats: int = 0,
        arguments: Sequence[str] = (),
    ) -> None:
        self.folder, self.np, self.program = folder, np, program
        places = ["-H", f"localhost:{seats}"] if seats else []
        self.deeds: list[Deed] = []
        self.job: Job = start_job(
            np,
            [sys.executable, str(program), str(folder), str(pause), *arguments],
            env=SETTINGS | dict(env or {}),
            options=["--min-np", "1", "--max-np", str(np), *places, *options],
        )
        self._read: dict[int, Reading] = {}

    # -- the state of the job ----------------------------------------------------------

    def pids(self) -> dict[int, int]:
        """The living workers: number -> process id."""
        found = {}
        for pid in leaks.processes(self.job.id):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if str(self.program).encode() not in words[1:2]:
                    continue
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                for variable in variables:
                    name, _, value = variable.partition(b"=")
                    if name == b"RINGJAX_WORKER":
                        found[int(value)] = pid
        return found

    def progress(self) -> dict[int, int]:
        """The workers that have completed steps: number -> last step."""
        for path in self.folder.glob("*.jsonl"):
            self._read.setdefault(int(path.stem), Reading(path)).follow()
        return {w: r.step for w, r in self._read.items() if r.step >= 0}

    def training(self) -> dict[int, int]:
        """The living workers that are at the current step and will stay: pids."""
        steps, pids = self.progress(), self.pids()
        newest = max((steps[w] for w in pids if w in steps), default=0)
        # Ranks that are being connected may be silent for longer.
        late = time.monotonic() - 3 * SILENCE
        doomed = {
            deed.worker
            for deed in self.deeds
            if deed.what in ENDS or (deed.what == "fence" and deed.at > late)
        }
        return {
            w: pid
            for w, pid in pids.items()
            if w not in doomed and steps.get(w, -9) >= newest - 2
        }

    def wait_for(self, workers: int, seconds: float = 60) -> dict[int, int]:
        """Waits until `workers` workers train."""
        deadline = time.monotonic() + seconds
        while len(found := self.training()) < workers:
            if self.job.poll() is not None or time.monotonic() > deadline:
                self.job.end_with_stacks()
                raise AssertionError(
                    f"{len(found)} of {workers} workers train after {seconds:g} s; "
                    f"deeds: {self.deeds[-6:]}\n{self.logs()}"
                )
            time.sleep(0.01)
        return found

    def wait_for_end_of(self, worker: int, seconds: float) -> None:
        """Waits until a worker's process has ended."""
        deadline = time.monotonic() + seconds
        while worker in self.pids():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def wait_for_steps(self, more: int, seconds: float = 60) -> None:
        """Waits until `more` further steps are complete."""
        goal = max(self.progress().values(), default=0) + more
        deadline = time.monotonic() + seconds
        while max(self.progress().values(), default=0) < goal:
            if self.job.poll() is not None or time.monotonic() > deadline:
                self.job.end_with_stacks()
                text = f"step {goal} did not come within {seconds:g} s"
                raise AssertionError(f"{text}; deeds: {self.deeds[-6:]}\n{self.logs()}")
            time.sleep(0.01)

    def logs(self) -> str:
        """The output of all workers and of ringrun, and the end of each trace."""
        ends = [
            f"--- trace of worker {path.stem}: {path.read_text()[-300:]}"
            for path in sorted(self.folder.glob("*.jsonl"))
        ]
        return "\n".join([self.job.logs(6000), *ends])

    # -- the deeds ---------------------------------------------------------------------

    def do(self, what: str, worker: int, pid: int, chance: random.Random) -> None:
        """Does one deed at once. Waits for a deed that takes time."""
        self.deeds.append(Deed(time.monotonic(), what, worker))
        with contextlib.suppress(ProcessLookupError):
            match what:
                case "kill":
                    os.kill(pid, signal.SIGKILL)
                case "term":
                    os.kill(pid, signal.SIGTERM)
                case "freeze":
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(chance.uniform(0.03, 0.15) * SILENCE)
                    os.kill(pid, signal.SIGCONT)
                case "fence":
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(SILENCE + 1.5)
                    os.kill(pid, signal.SIGCONT)
                case "slow":  # the worker runs 5 to 50 % of a second
                    for _ in range(10):
                        os.kill(pid, signal.SIGSTOP)
                        time.sleep(chance.uniform(0.05, 0.095))
                        os.kill(pid, signal.SIGCONT)
                        time.sleep(chance.uniform(0.005, 0.05))
                case "memory":
                    (self.folder / f"full.{worker}").touch()
                case "garbage":
                    strangers.disturb(self.job.id, _job_name(pid), 0.1)

    def rage(
        self,
        chance: random.Random,
        seconds: float,
        every: float,
        spared: Collection[int] = (),
    ) -> None:
        """Does deeds at random moments, but leaves at least one training worker.

        Args:
            seconds: the duration.
            every: the mean seconds between two deeds.
            spared: workers that suffer no deeds.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(chance.uniform(0, 2 * every))
            if self.job.poll() is not None:
                raise AssertionError(f"the job ended; {self.deeds[-9:]}\n{self.logs()}")
            training = self.training()
            spare = len(training) - 1
            possible = sorted(training.keys() - set(spared))
            victims = chance.sample(possible, k=max(0, min(spare, 2, len(possible))))
            for worker in victims[: 2 if chance.random() < 0.3 else 1]:
                if worker != victims[0]:  # during the first recovery
                    time.sleep(chance.choice((0.0, 0.15)) * chance.random())
                what = chance.choices(_DEEDS, _WEIGHTS)[0]
                self.do(what, worker, training[worker], chance)

    def end(self, seconds: float = 90) -> Verdict:
        """Ends the training and checks all its steps."""
        (self.folder / "stop").touch()
        code = self.job.wait(seconds)
        assert code == 0, f"ringrun ended with {code}; {self.deeds[-9:]}\n{self.logs()}"
        verdict = check(self.folder, self.deeds, eager=self.program == EAGER)
        # ringrun also replaces a worker that ended by an error of its own. Here such an
        # end is a bug, except for a worker whose memory was filled on purpose.
        full = {str(deed.worker) for deed in self.deeds if deed.what == "memory"}
        lines = re.finditer(
            r"^ringrun: .*worker (\d+), pid \d+\) (failed|was declared lost: failed).*",
            self.job.launcher_output(),
            re.MULTILINE,
        )
        failed = "\n".join(line[0] for line in lines if line[1] not in full)
        assert not failed, f"{failed}\n{verdict.steps} steps are right\n{self.logs()}"
        return verdict

    def counts(self) -> dict[str, int]:
        """The number of deeds of each kind."""
        return dict(Counter(deed.what for deed in self.deeds))

    def failures(self) -> int:
        """The number of workers that completed steps and ended before the training."""
        gone = self.progress().keys() - self.pids().keys()
        return sum(not self._read[worker].finished for worker in gone)


_DEEDS = ("kill", "term", "memory", "freeze", "fence", "slow", "garbage")
_WEIGHTS = (67, 7, 4, 8, 4, 7, 3)


def _job_name(pid: int) -> str:
    """The job's name from the environment of process `pid`; zeros if it has ended."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == b"RINGJAX_JOB":
                return value.decode()
    return "0" * 16


class Reading:
    """Reads a trace while its worker writes it."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self.step = path, 0, -1
        self.finished = False

    def follow(self) -> None:
        """Reads the new lines. Notes the last step and whether training has ended."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines()[::-1]:
            found = json.loads(line)
            self.finished |= found.get("event") == "finished"
            if "digest" in found:
                self.step = found["step"]
                return


# -- the proof -------------------------------------------------------------------------


def check(
    folder: Path, deeds: list[Deed] | tuple[Deed, ...] = (), *, eager: bool = False
) -> Verdict:
    """Computes all steps again and compares them with the traces.

    Args:
        folder: the folder of the traces.
        deeds: the deeds that were done.
        eager: whether the workers ran eager_program.py.

    Raises:
        AssertionError: if a step is missing, was done twice, or differs between workers
            or from the computation in one process.
    """
    traces = {int(p.stem): lines(p) for p in folder.glob("*.jsonl")}
    by_step: dict[int, dict[int, dict[str, Any]]] = {}
    for worker, trace in traces.items():
        _check_order(worker, trace)
        for line in trace:
            by_step.setdefault(line["step"], {})[worker] = line
    count = len(by_step)
    missing = sorted(set(range(max(by_step, default=-1) + 1)) - set(by_step))
    assert not missing, f"steps {missing[:9]} of {count} were completed by nobody"
    _replay(by_step, eager)
    sizes = [len(next(iter(by_step[s].values()))["who"]) for s in range(count)]
    verdict = Verdict(count, largest=max(sizes), smallest=min(sizes))
    kills = [deed for deed in deeds if deed.what == "kill"]
    for deed in kills:
        verdict.recoveries += recoveries(deed, traces)
    verdict.pauses = list(_pauses(by_step))
    return verdict


def lines(path: Path) -> list[dict[str, Any]]:
    """The steps of a trace. A killed worker may leave half a line at its end."""
    text = path.read_bytes()
    found = [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    return [line for line in found if "digest" in line]


def _check_order(worker: int, trace: list[dict[str, Any]]) -> None:
    for before, after in itertools.pairwise(trace):
        assert after["step"] == before["step"] + 1, (
            f"worker {worker}: step {after['step']} after step {before['step']}"
        )
        assert after["epoch"] >= before["epoch"], f"worker {worker}: {before}, {after}"
    for line in trace:
        assert worker in line["who"], f"worker {worker} is not in its own sum: {line}"


def _replay(by_step: dict[int, dict[int, dict[str, Any]]], eager: bool) -> None:
    if eager:
        from chaos.numpy_model import Replay
    else:
        from chaos.model import Replay  # type: ignore[assignment]

    replay = Replay()
    for step in range(len(by_step)):
        here = by_step[step]
        who, *others = {tuple(line["who"]) for line in here.values()}
        assert not others, f"step {step}: ranks added up other workers: {who}, {others}"
        assert len(set(who)) == len(who), f"step {step}: {who}"
        digest, *others = {line["digest"] for line in here.values()}
        assert not others, f"step {step}: ranks have other parameters: {sorted(here)}"
        again = replay.step(list(who))
        assert digest == again, (
            f"step {step} with workers {who}: its parameters {digest} are not those of "
            f"one process, {again}; the step before was by {list(by_step[step - 1])}"
        )


def recoveries(deed: Deed, traces: dict[int, list[dict[str, Any]]]) -> Iterator[float]:
    """Seconds from a kill to the next step without the victim, for each survivor."""
    victim = deed.worker
    for worker, trace in traces.items():
        before = [line for line in trace if line["t"] <= deed.at]
        if worker == victim or not before or victim not in before[-1]["who"]:
            continue
        without = (
            line["t"] for line in trace[len(before) :] if victim not in line["who"]
        )
        with contextlib.suppress(StopIteration):  # this survivor was killed, too
            yield next(without) - deed.at


def _pauses(by_step: dict[int, dict[int, dict[str, Any]]]) -> Iterator[float]:
    """Seconds between a newcomer's first step and the step before, for all members."""
    for step in range(1, len(by_step)):
        before, here = by_step[step - 1], by_step[step]
        both = before.keys() & here.keys()
        grown = set(next(iter(here.values()))["who"]) - set(
            next(iter(before.values()))["who"]
        )
        if grown and both:
            yield max(here[w]["t"] - before[w]["t"] for w in both)


def quantile(samples: list[float], share: float) -> float:
    """The sample that a fraction `share` of all samples does not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
