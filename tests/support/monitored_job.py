"""Jobs with monitoring: reads their metrics, and connects as `ringjax top` does."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ringjax.monitor import sockets
from ringjax.top.job_connection import JobConnection
from support import leaks
from support.launch import Job, StartJob
from support.waiting import LONG

# Rank 1 is late in every step. The job ends when the file $FOLDER/end exists.
STEPS = """
import os, signal, sys, time
import numpy as np
import ringjax
from ringjax import eager, elastic
from support import numpy_only

ringjax.init()
end, lose = os.environ["FOLDER"] + "/end", os.environ["FOLDER"] + "/lose"
open(f"{os.environ['FOLDER']}/up.{ringjax.rank()}", "w").close()

def load():
    time.sleep(0.02)

def step():
    time.sleep(0.005)
    if ringjax.rank() == 1:
        load()
    eager.allreduce(np.ones(50_000, "f4"), name="gradients")
    over = np.array([os.path.exists(end)], "f8")
    return bool(eager.allreduce(over, ringjax.Max, name="over")[0])
"""
STATIC = f"{STEPS}\nwhile not step():\n    pass\n"
ELASTIC = (
    STEPS
    + """
state = elastic.State(step=0)

@elastic.run
def train(state):
    while not step():
        state.step += 1
        if state.step % 10 == 0:
            state.commit()
        if os.environ["RINGJAX_WORKER"] == "2" and os.path.exists(lose):
            os.kill(os.getpid(), signal.SIGKILL)

train(state)
"""
)


class MonitoredJob:
    """A job, and the folder whose files control the job."""

    def __init__(self, start_job: StartJob, folder: Path) -> None:
        self._start, self.folder = start_job, folder
        self.temporary = folder / "t"
        self.temporary.mkdir()

    def start(self, np: int, script: str, *options: str, **env: str) -> Job:
        given = {"FOLDER": str(self.folder), "TMPDIR": str(self.temporary)}
        self.job = self._start(np, script, {**given, **env}, options)
        return self.job

    def wait_until_started(self) -> None:
        """Waits until all ranks of the job have started."""
        up = [self.folder / f"up.{rank}" for rank in range(self.job.np)]
        late = leaks.settle(lambda: [str(p) for p in up if not p.exists()], 40)
        assert not late, self.job.logs()

    def url(self) -> str:
        """Returns the address of the metrics."""
        found: list[str] = []

        def look() -> list[str]:
            text = self.job.launcher_output()
            found.extend(re.findall(r"ringrun: metrics: (http://\S+)", text))
            return [] if found else ["no address"]

        assert not leaks.settle(look, LONG), self.job.logs()
        return found[0]

    def metrics(self) -> dict[str, dict[str, float]]:
        """Returns counters and gauges by name, then by the values of their labels."""
        with urllib.request.urlopen(self.url(), timeout=LONG) as answer:
            text = answer.read().decode()
        return {
            sample.name: {
                ",".join(s.labels.values()): s.value
                for s in family.samples
                if s.name == sample.name
            }
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }

    def wait_for(self, done: Callable[[dict[str, dict[str, float]]], bool]) -> Any:
        """Waits until the metrics fulfil a condition, and returns them."""
        found: list[dict[str, dict[str, float]]] = [{}]

        def look() -> list[str]:
            found[0] = self.metrics()
            return [] if done(found[0]) else ["not yet"]

        assert not leaks.settle(look, LONG), (found[0], self.job.logs())
        return found[0]

    def attach(self) -> JobConnection:
        """Connects to ringrun, as `ringjax top` does."""
        return JobConnection(self.path())

    def path(self) -> Path:
        """Returns the socket of ringrun."""
        place = self.temporary / sockets.socket_folder().name
        name = f"{self.job.pid}-0.sock"

        def look() -> list[str]:
            """Tries to connect. The file exists a moment before ringrun listens."""
            try:
                sockets.connect(place / name).close()
            except sockets.JobSocketError as error:
                return [str(error)]
            return []

        assert not leaks.settle(look, LONG)
        return place / name

    def end(self) -> None:
        """Ends the job, and checks its exit code."""
        (self.folder / "end").touch()
        assert self.job.wait() == 0, self.job.logs()
        assert not self.path_is_left()

    def path_is_left(self) -> bool:
        """Returns whether a socket file of ringrun still exists."""
        return bool(list(self.temporary.rglob("*.sock")))
