"""Chaos tests: faults that kill, freeze, slow or disturb workers at random moments.

The workers run eager_program.py, or program.py in tests with XLA. Afterwards `check`
proves that no fault changed the training. It computes every step again in one process,
with the contributions of the workers that took part in that step, and compares the
parameters bit for bit. Equal bits prove that all ranks had equal parameters after every
step, that no step was lost, made twice or made with a wrong mean, and that no worker
contributed after it was declared lost.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from support import leaks, strangers
from support.launch import Job, StartJob

PROGRAM = Path(__file__).with_name("program.py")
EAGER_PROGRAM = Path(__file__).with_name(
    "eager_program.py"
)  # numpy: workers start fast
# Seconds after which a silent rank is declared lost. On a busy machine where several
# ranks compile, a rank may wait almost that long for a core.
FAILURE_TIMEOUT = 4.0
SETTINGS = {
    "RINGJAX_FAILURE_TIMEOUT": f"{FAILURE_TIMEOUT:g}",
    "RINGJAX_HEARTBEAT": "0.2",
    "RINGJAX_TILE_BYTES": "4096",  # small messages use the code for large ones
}


@dataclass(frozen=True)
class Fault:
    """A fault that was injected into one worker, or into all workers.

    `at` is a time of `time.monotonic`. These kinds end the worker: "kill", "term" (the
    worker leaves), "memory" (an allocation fails and raises MemoryError in the
    training) and "fence" (the worker is silent for too long). These do not: "freeze",
    "slow", and "garbage" (unrelated programs connect to all workers).
    """

    at: float
    kind: str
    worker: int


@dataclass
class CheckResult:
    """The measurements of `check`.

    Attributes:
        steps: the number of completed steps.
        recoveries: for every kill and every survivor, seconds to the next step.
        pauses: for every worker that joined, seconds between the step before it joined
            and its first step.
        largest, smallest: the largest and the smallest number of workers in a step.
    """

    steps: int
    recoveries: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    largest: int = 0
    smallest: int = 0


class StepByStep(Protocol):
    """The training in one process, with which a chaos test compares its job."""

    def step(self, workers: list[int]) -> str:
        """Makes the next step with `workers`; returns the digest of the parameters."""


def jax_replay() -> StepByStep:
    """Returns the training of program.py."""
    from chaos.model import Replay

    return Replay()


def eager_replay() -> StepByStep:
    """Returns the training of eager_program.py."""
    from chaos.numpy_model import Replay

    return Replay()


FATAL_KINDS = ("kill", "term", "memory")


class ChaosJob:
    """A job into whose workers a test injects faults.

    Args:
        start_job: the fixture, or another function that starts a `launch.Job`.
        folder: an empty folder for the traces.
        np: the number of workers at the start, which is also the maximum.
        pause: seconds between two steps.
        env: additional environment variables of the job.
        options: additional command line arguments of ringrun.
        program: the program of the workers.
        slots: the number of slots of the host. ringrun never reuses the slot of a
            worker that left, and waits before it reuses the slot of a worker that
            failed early.
        arguments: additional command line arguments of the program.
        interval: seconds between two looks at the traces. With hundreds of workers, a
            look takes some 10 ms.
        replay: makes the training with which the job is compared, if the program is
            neither program.py nor eager_program.py.
        may_fail: workers that may end by an error of their own.
    """

    def __init__(
        self,
        start_job: StartJob,
        folder: Path,
        np: int = 4,
        pause: float = 0.005,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        program: Path = EAGER_PROGRAM,
        slots: int = 0,
        arguments: Sequence[str] = (),
        interval: float = 0.01,
        replay: Callable[[], StepByStep] | None = None,
        may_fail: Collection[int] = (),
    ) -> None:
        self.folder, self.np, self.program = folder, np, program
        self.interval, self._may_fail = interval, may_fail
        self._replay = replay or (
            eager_replay if program == EAGER_PROGRAM else jax_replay
        )
        hosts = ["-H", f"localhost:{slots}"] if slots else []
        self.faults: list[Fault] = []
        self.job: Job = start_job(
            np,
            [sys.executable, str(program), str(folder), str(pause), *arguments],
            env=SETTINGS | dict(env or {}),
            options=["--min-np", "1", "--max-np", str(np), *hosts, *options],
        )
        self._readers: dict[int, TraceReader] = {}

    # -- the state of the job ----------------------------------------------------------

    def pids(self) -> dict[int, int]:
        """Returns the process ids of the living workers by worker number."""
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
        """Returns the last completed step of each worker by worker number."""
        for path in self.folder.glob("*.jsonl"):
            self._readers.setdefault(int(path.stem), TraceReader(path)).read_new_lines()
        return {w: r.step for w, r in self._readers.items() if r.step >= 0}

    def training(self) -> dict[int, int]:
        """Returns the process ids of living workers that train and no fault ends.

        A worker counts if it is at most two steps behind the newest step.
        """
        steps, pids = self.progress(), self.pids()
        newest = max((steps[w] for w in pids if w in steps), default=0)
        # A rank that is still being connected may be silent for longer than the
        # timeout, so an older "fence" may have ended no worker.
        recent = time.monotonic() - 3 * FAILURE_TIMEOUT
        doomed = {
            fault.worker
            for fault in self.faults
            if fault.kind in FATAL_KINDS
            or (fault.kind == "fence" and fault.at > recent)
        }
        return {
            w: pid
            for w, pid in pids.items()
            if w not in doomed and steps.get(w, -9) >= newest - 2
        }

    def wait_for_workers(self, workers: int, seconds: float = 60) -> dict[int, int]:
        """Waits until `workers` workers train."""
        deadline = time.monotonic() + seconds
        while len(found := self.training()) < workers:
            if self.job.poll() is not None or time.monotonic() > deadline:
                self.job.end_with_stacks()
                raise AssertionError(
                    f"{len(found)} of {workers} workers train after {seconds:g} s; "
                    f"faults: {self.faults[-6:]}\n{self.logs()}"
                )
            time.sleep(self.interval)
        return found

    def wait_for_exit(self, worker: int, seconds: float) -> None:
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
                text = f"step {goal} was not completed within {seconds:g} s"
                raise AssertionError(
                    f"{text}; faults: {self.faults[-6:]}\n{self.logs()}"
                )
            time.sleep(self.interval)

    def logs(self) -> str:
        """Returns the output of workers and ringrun, and the end of each trace."""
        ends = [
            f"--- trace of worker {path.stem}: {path.read_text()[-300:]}"
            for path in sorted(self.folder.glob("*.jsonl"))
        ]
        return "\n".join([self.job.logs(6000), *ends])

    # -- injecting faults --------------------------------------------------------------

    def inject(self, kind: str, worker: int, pid: int, rng: random.Random) -> None:
        """Injects one fault now, and returns when the fault is over."""
        self.faults.append(Fault(time.monotonic(), kind, worker))
        with contextlib.suppress(ProcessLookupError):
            match kind:
                case "kill":
                    os.kill(pid, signal.SIGKILL)
                case "term":
                    os.kill(pid, signal.SIGTERM)
                case "freeze":
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(rng.uniform(0.03, 0.15) * FAILURE_TIMEOUT)
                    os.kill(pid, signal.SIGCONT)
                case "fence":
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(FAILURE_TIMEOUT + 1.5)
                    os.kill(pid, signal.SIGCONT)
                case "slow":
                    # For about a second, the worker runs 5 to 50 % of the time.
                    for _ in range(10):
                        os.kill(pid, signal.SIGSTOP)
                        time.sleep(rng.uniform(0.05, 0.095))
                        os.kill(pid, signal.SIGCONT)
                        time.sleep(rng.uniform(0.005, 0.05))
                case "memory":
                    (self.folder / f"full.{worker}").touch()
                case "garbage":
                    strangers.disturb(self.job.id, _job_name(pid), 0.1)

    def inject_faults(
        self,
        rng: random.Random,
        seconds: float,
        every: float,
        protected: Collection[int] = (),
    ) -> None:
        """Injects faults at random moments, but leaves at least one training worker.

        Args:
            seconds: the duration.
            every: the mean seconds between two faults.
            protected: workers into which no fault is injected.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(rng.uniform(0, 2 * every))
            if self.job.poll() is not None:
                raise AssertionError(
                    f"the job ended; {self.faults[-9:]}\n{self.logs()}"
                )
            training = self.training()
            max_victims = min(len(training) - 1, 2)
            possible = sorted(training.keys() - set(protected))
            victims = rng.sample(possible, k=max(0, min(max_victims, len(possible))))
            for worker in victims[: 2 if rng.random() < 0.3 else 1]:
                if worker != victims[0]:  # hit the second during the first's recovery
                    time.sleep(rng.choice((0.0, 0.15)) * rng.random())
                kind = rng.choices(_FAULT_KINDS, _FAULT_WEIGHTS)[0]
                self.inject(kind, worker, training[worker], rng)

    def end(self, seconds: float = 90) -> CheckResult:
        """Ends the training and checks all its steps."""
        (self.folder / "stop").touch()
        code = self.job.wait(seconds)
        assert code == 0, (
            f"ringrun ended with {code}; {self.faults[-9:]}\n{self.logs()}"
        )
        result = check(self.folder, self.faults, self._replay())
        # ringrun would also replace a worker that failed with an error of its own. In
        # these tests an error is a bug, except the MemoryError of a "memory" fault.
        full = {fault.worker for fault in self.faults if fault.kind == "memory"}
        expected = {*map(str, full | set(self._may_fail))}
        failures = re.finditer(
            r"^ringrun: .*worker (\d+), pid \d+\) (failed|was declared lost: failed).*",
            self.job.launcher_output(),
            re.MULTILINE,
        )
        failed = "\n".join(match[0] for match in failures if match[1] not in expected)
        assert not failed, f"{failed}\n{result.steps} steps are right\n{self.logs()}"
        return result

    def counts(self) -> dict[str, int]:
        """Counts the faults of each kind."""
        return dict(Counter(fault.kind for fault in self.faults))

    def failures(self) -> int:
        """Counts the workers that completed steps and ended before the training."""
        gone = self.progress().keys() - self.pids().keys()
        return sum(not self._readers[worker].finished for worker in gone)


_FAULT_KINDS = ("kill", "term", "memory", "freeze", "fence", "slow", "garbage")
_FAULT_WEIGHTS = (67, 7, 4, 8, 4, 7, 3)


def _job_name(pid: int) -> str:
    """Reads RINGJAX_JOB of process `pid`; returns zeros if the process has ended."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == b"RINGJAX_JOB":
                return value.decode()
    return "0" * 16


class TraceReader:
    """Reads a trace while its worker writes it."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self.step = path, 0, -1
        self.finished = False

    def read_new_lines(self) -> None:
        """Updates `step`, the last completed step, and `finished`, the worker's end."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines()[::-1]:
            found = json.loads(line)
            self.finished |= found.get("event") == "finished"
            if "digest" in found:
                self.step = found["step"]
                return


# -- checking the traces ---------------------------------------------------------------


def check(
    folder: Path,
    faults: list[Fault] | tuple[Fault, ...] = (),
    replay: StepByStep | None = None,
) -> CheckResult:
    """Computes all steps again and compares them with the traces.

    Args:
        folder: the folder of the traces.
        faults: the faults that were injected.
        replay: the training in one process; None for that of program.py.

    Raises:
        AssertionError: if a step is missing, was made twice, or differs between workers
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
    _compare(by_step, replay or jax_replay())
    sizes = [len(next(iter(by_step[s].values()))["workers"]) for s in range(count)]
    result = CheckResult(count, largest=max(sizes), smallest=min(sizes))
    kills = [fault for fault in faults if fault.kind == "kill"]
    for fault in kills:
        result.recoveries += recoveries(fault, traces)
    result.pauses = list(_pauses(by_step))
    return result


def lines(path: Path) -> list[dict[str, Any]]:
    """Reads the steps of a trace, without the half line that a kill may leave."""
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
        assert worker in line["workers"], (
            f"worker {worker} is not in its own sum: {line}"
        )


def _compare(by_step: dict[int, dict[int, dict[str, Any]]], replay: StepByStep) -> None:
    for step in range(len(by_step)):
        here = by_step[step]
        workers, *others = {tuple(line["workers"]) for line in here.values()}
        assert not others, f"step {step}: ranks summed workers {workers}, but {others}"
        assert len(set(workers)) == len(workers), f"step {step}: {workers}"
        digest, *others = {line["digest"] for line in here.values()}
        assert not others, f"step {step}: parameters differ between {sorted(here)}"
        replayed, before = replay.step(list(workers)), list(by_step.get(step - 1, ()))
        assert digest == replayed, (
            f"step {step} with workers {workers}: parameters {digest} are not those of "
            f"one process, {replayed}; step {step - 1}: {before}"
        )


def recoveries(
    fault: Fault, traces: dict[int, list[dict[str, Any]]]
) -> Iterator[float]:
    """Yields for each survivor the seconds from a kill to the step without the victim.

    Survivors that were killed before that step are left out.
    """
    victim = fault.worker
    for worker, trace in traces.items():
        before = [line for line in trace if line["t"] <= fault.at]
        if worker == victim or not before or victim not in before[-1]["workers"]:
            continue
        without = (
            line["t"] for line in trace[len(before) :] if victim not in line["workers"]
        )
        with contextlib.suppress(StopIteration):
            yield next(without) - fault.at


def _pauses(by_step: dict[int, dict[int, dict[str, Any]]]) -> Iterator[float]:
    """Yields the longest pause of a member before each first step of a newcomer."""
    for step in range(1, len(by_step)):
        before, here = by_step[step - 1], by_step[step]
        both = before.keys() & here.keys()
        grown = set(next(iter(here.values()))["workers"]) - set(
            next(iter(before.values()))["workers"]
        )
        if grown and both:
            yield max(here[w]["t"] - before[w]["t"] for w in both)


def quantile(samples: list[float], share: float) -> float:
    """Returns the sample below which a fraction `share` of the samples lies, or 0."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
