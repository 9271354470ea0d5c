"""The goodput line of ringrun beside a stopwatch.

The programs spend their time in known places, and write what a stopwatch shows: what
they did, from when until when. The tests add these seconds up, divide them by the time
of the job times its ranks, and compare the result with the line. So no test depends on
how fast the machine is.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
from support.launch import Job, StartJob
from support.monitored_job import STATIC as MONITORED
from support.monitored_job import MonitoredJob

LINE = re.compile(r"ringrun: (goodput .*)")
NEAR = 5.0  # percentage points between the line and the stopwatch


def _notes(job: Job) -> list[str]:
    """Returns the lines of ringrun itself, without those of the ranks."""
    lines = job.launcher_output().splitlines()
    return [line for line in lines if line.startswith("ringrun: ")]


STOPWATCH = """
import contextlib, json, os, signal, sys, time
import numpy as np
import ringjax
from ringjax import eager, elastic

number = os.environ.get("RINGJAX_WORKER", os.environ["RINGJAX_RANK"])
book = open(f"{os.environ['FOLDER']}/{number}.jsonl", "a", buffering=1)

@contextlib.contextmanager
def watch(what):
    began = time.monotonic()
    yield
    note(what, began, time.monotonic())

def note(what, began, ended):
    book.write(json.dumps([what, began, ended]) + "\\n")

def reduce(name="gradients"):
    with watch("call"):
        eager.allreduce(np.ones(1000, "f4"), name=name)
"""


class Lap(NamedTuple):
    what: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Stopwatch:
    """The times that the ranks of a job have written, and the line of its ringrun."""

    def __init__(self, job: Job, folder: Path, ranks: int) -> None:
        assert job.wait(50) == 0, job.logs()
        (self.line,) = LINE.findall(job.launcher_output())
        found = re.findall(r"([a-z ]+) ([\d.]+) %", self.line)
        self.percent = {name.strip(): float(value) for name, value in found}
        assert sum(self.percent.values()) == pytest.approx(100, abs=0.01)
        self.wall = float(re.findall(r" of ([\d.]+) s", self.line)[0])
        self.ranks = ranks
        self.laps = {
            int(path.stem): [
                Lap(*json.loads(line)) for line in path.read_text().splitlines()
            ]
            for path in folder.glob("*.jsonl")
        }
        assert _notes(job)[-1].endswith(self.line)

    def seconds(self, process: int) -> defaultdict[str, float]:
        """Returns how long a process did each thing."""
        sums: defaultdict[str, float] = defaultdict(float)
        for lap in self.laps[process]:
            sums[lap.what] += lap.seconds
        return sums

    def first(self, process: int, what: str) -> Lap:
        return next(lap for lap in self.laps[process] if lap.what == what)

    def sum_of(self, parts: list[str]) -> float:
        return sum(self.percent.get(part, 0.0) for part in parts)

    def rank_seconds(self, part: str) -> float:
        return self.percent[part] / 100 * self.wall * self.ranks

    def steps(self, process: int) -> float:
        """Returns the seconds from the end of the first call to that of the last."""
        calls = [lap for lap in self.laps[process] if lap.what == "call"]
        return calls[-1].ended - calls[0].ended

    def waits(self) -> list[float]:
        """Returns how long each rank waited in the calls after the first one.

        The rank that comes last in a call does not wait, and is in it for the least
        time. All other ranks have waited for the rest of their time in the call.
        """
        calls = [
            [lap.seconds for lap in laps if lap.what == "call"][1:]
            for laps in self.laps.values()
        ]
        moves = [min(together) for together in zip(*calls, strict=True)]
        return [sum(own) - sum(moves) for own in calls]

    def check(self, **seconds: float) -> None:
        """Compares parts of the line with seconds of all ranks together.

        The name "losses_joins" stands for the sum of two parts of the line.
        """
        whole = self.wall * self.ranks
        seen = {name: self.sum_of(name.split("_")) for name in seconds}
        expected = {name: 100 * each / whole for name, each in seconds.items()}
        assert seen == pytest.approx(expected, abs=NEAR), (self.line, seconds)


STATIC = (
    STOPWATCH
    + """
import jax

time.sleep(1.5 * (number == "1"))  # a slow start
ringjax.init()

@jax.jit
def step(x):
    time.sleep(1.0)  # the time of a slow compilation
    return 2 * x

x = jax.device_put(np.ones(1000, "f4")).block_until_ready()
with watch("compile"):
    step(x).block_until_ready()
for index in range(40):
    with watch("work"):
        time.sleep(0.06 if number == "1" else 0.03)  # rank 1 needs twice as long
    if index in (10, 20) and number == "0":
        with watch("checkpoint"), ringjax.time_for("checkpoints"):
            time.sleep(0.8)
    reduce()
with watch("end"):
    time.sleep(0.5)
    ringjax.shutdown()
"""
)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_parts_of_a_static_job(
    start_job: StartJob, tmp_path: Path, ranks: int
) -> None:
    """Rank 1 starts late and is slow, and rank 0 writes two checkpoints."""
    job = start_job(ranks, STATIC, {"FOLDER": str(tmp_path)})
    watch = Stopwatch(job, tmp_path, ranks)
    all_seconds = [watch.seconds(rank) for rank in range(ranks)]
    compiled = sum(seconds["compile"] for seconds in all_seconds)
    checkpoints = all_seconds[0]["checkpoint"]
    steps = sum(map(watch.steps, range(ranks)))
    # Most of it is rank 1's fault, and some of it that of the two checkpoints.
    waits = sum(watch.waits())
    work = [seconds["work"] for seconds in all_seconds]
    assert waits > (ranks - 1) * (work[1] - work[0] + checkpoints) / 2
    # Rank 1 sleeps before `init`, which makes all ranks wait, and all sleep at the end.
    assert watch.rank_seconds("start") > 1.5 * ranks - 0.1
    assert watch.rank_seconds("end") > 0.5 * ranks - 0.1
    watch.check(
        # All ranks are in step when their first call ends, and train until the last.
        start_end=watch.wall * ranks - steps - compiled,
        compile=compiled,
        stragglers=waits - checkpoints * (ranks - 1),
        checkpoints=checkpoints * ranks,
        goodput=steps - waits - checkpoints,
    )


def test_the_line_sums_up_a_kill_and_a_join(
    start_job: StartJob, tmp_path: Path
) -> None:
    """The place of worker 2 is empty until worker 3 is in step with the others."""
    script = STOPWATCH + KILL
    job = start_job(3, script, {"FOLDER": str(tmp_path)}, ["--min-np", "2"])
    watch = Stopwatch(job, tmp_path, 3)
    killed = watch.first(2, "killed").began
    # Worker 3 is in step when its first call ends.
    vacant = watch.first(3, "call").ended - killed
    # The survivors lose what is neither work nor a short call: they wait for the
    # repair, restart the training function, and wait for the newcomer's first step.
    stopped = sum(_stopped(watch, survivor, killed, vacant) for survivor in (0, 1))
    assert watch.percent["losses"] > 0 and watch.percent["joins"] > 0
    steps = sum(watch.steps(worker) for worker in range(4))
    watch.check(losses_joins=vacant + stopped, goodput_stragglers=steps - stopped)


KILL = """
ringjax.init()
state = elastic.State(step=0, end=10**9)

@elastic.run
def train(state):
    while state.step < state.end:
        with watch("work"):
            time.sleep(0.03)
        if number == "2" and state.step == 40:
            note("killed", time.monotonic(), time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        reduce()
        state.step += 1
        # Train for 100 steps with the successor of worker 2.
        if state.step > 41 and ringjax.size() == 3 and state.end == 10**9:
            state.end = state.step + 100
        state.commit()

train(state)
"""


def _stopped(watch: Stopwatch, process: int, since: float, seconds: float) -> float:
    """Returns the seconds outside of work, in pauses of more than 0.05 s."""
    work = [lap for lap in watch.laps[process] if lap.what == "work"]
    pauses = [
        after.began - before.ended
        for before, after in itertools.pairwise(work)
        if after.began > since and before.ended < since + seconds
    ]
    return sum(pause for pause in pauses if pause > 0.05)


REPEATED = """
ringjax.init()
state = elastic.State(step=0)
failed = []

@elastic.run
def train(state):
    while state.step < 80:
        with watch("again" if state.step in failed else "work"):
            time.sleep(0.03)
        reduce()
        state.step += 1
        if state.step == 58 and not failed:
            failed.extend(range(40, 58))  # the steps since the last commit
            raise ringjax.errors.RingjaxError("an error of a test")
        if state.step % 20 == 0:
            state.commit()

train(state)
"""


def test_steps_after_an_error_are_repeated(start_job: StartJob, tmp_path: Path) -> None:
    """All ranks return to the commit of step 40 after 18 further steps."""
    script = STOPWATCH + REPEATED
    job = start_job(2, script, {"FOLDER": str(tmp_path)}, ["--min-np", "2"])
    watch = Stopwatch(job, tmp_path, 2)
    again = sum(watch.seconds(worker)["again"] for worker in range(2))
    assert again > 1.0  # 18 steps of 2 ranks
    watch.check(**{"repeated steps": again})


@pytest.mark.parametrize(
    "script",
    ["print('no ringjax')", "import ringjax\nringjax.init()\nprint(ringjax.rank())"],
)
def test_a_job_that_does_not_train_has_no_line(
    start_job: StartJob, script: str
) -> None:
    job = start_job(2, script)
    assert job.wait() == 0, job.logs()
    assert _notes(job) == []


def test_a_job_that_fails_ends_with_its_reason(
    start_job: StartJob, tmp_path: Path
) -> None:
    script = STOPWATCH + FAILING
    job = start_job(2, script, {"FOLDER": str(tmp_path)})
    assert job.wait() == 1, job.logs()
    first, last = _notes(job)
    assert LINE.fullmatch(first) and "boom" in last


FAILING = """
ringjax.init()
for step in range(100):
    time.sleep(0.02)
    reduce()
raise ValueError("boom")
"""


def test_a_running_job_shows_its_goodput(start_job: StartJob, tmp_path: Path) -> None:
    """`ringjax top` and the metrics show the same parts as the line at the end."""
    watched = MonitoredJob(start_job, tmp_path)
    watched.start(2, MONITORED, "--metrics", "0")
    seen = watched.wait_for(lambda m: "ringjax_goodput_ratio" in m)
    lost = seen["ringjax_lost_time_ratio"]
    assert sum(lost.values()) + seen["ringjax_goodput_ratio"][""] == pytest.approx(1)
    assert lost["stragglers"] > 0
    job = watched.attach()
    try:
        while not (status := job.read(20)) or not status.shares:
            pass
    finally:
        job.close()
    assert sum(status.shares.values()) == pytest.approx(1)
    watched.end()
    assert LINE.search(watched.job.launcher_output())
