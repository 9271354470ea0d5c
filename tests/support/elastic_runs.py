"""Elastic jobs inside a test, with a stand-in for the coordinator.

The launcher is the real one, in a thread; the workers are shell scripts.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringjax.run.elastic.bounds import Elastic
from ringjax.run.elastic.job import ElasticJob
from ringjax.run.elastic.workers import Worker
from ringjax.run.hosts.host_command import Spec
from ringjax.run.output import Console
from ringjax.run.static_job import Outcome
from support import leaks
from support.launch import environment


class StandIn:
    """Everybody whose process runs is a member; who is started joins at once."""

    def __init__(self, *args: Any, np: int, **rest: Any) -> None:
        self.np = np
        self.addresses = ["127.0.0.1:1"]
        self.arguments = rest
        self.started: list[int] = []
        self.told: list[tuple[int, str]] = []
        self.epoch = -1
        self.admits = True
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK)

    def start(self) -> None: ...

    def close(self) -> None:
        os.close(self.wakeup)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)

    def tell(self, *event: Any) -> None:
        self.events.put(event)
        os.eventfd_write(self.wakeup, 1)

    def tick(self, now: float) -> None: ...

    def expected(self, worker: int) -> None:
        if self.admits:
            self.started.append(worker)
            if self.epoch >= 0 or len(self.started) == self.np:
                self._begin("resize")

    def ended(self, worker: int) -> None:
        self.tell("ended", worker)

    def lost(self, worker: int, text: str, heirs: bool = True) -> None:
        self.told.append((worker, text))
        if worker in self.started:
            self.started.remove(worker)
            if self.started and self.epoch >= 0:
                self._begin("repair")

    def fence(self, worker: int, why: str) -> None:
        self.tell("fenced", worker, why)
        self.lost(worker, why)

    def dismiss(self, worker: int) -> None:
        self.tell("dismissed", worker, "as it had asked for")
        self.lost(worker, "left")

    def _begin(self, kind: str) -> None:
        self.epoch += 1
        ranks = {worker: rank for rank, worker in enumerate(self.started)}
        self.tell("members", self.epoch, kind, ranks)


class Run:
    """An elastic job of shell scripts in a thread; the fixture `job` starts one."""

    def __init__(
        self,
        script: str,
        elastic: Elastic,
        directory: Path,
        coordinator: Callable[..., StandIn] = StandIn,
        timeout: float = 30.0,
        payload: bytes | None = None,
    ) -> None:
        self.directory = directory
        self.outcome: Outcome | None = None
        self.coordinator: StandIn | None = None

        def make(*args: Any, **kwargs: Any) -> StandIn:
            self.coordinator = coordinator(*args, **kwargs)
            return self.coordinator

        spec = Spec(
            command=["sh", "-c", script],
            env=environment("elastic", {"FOLDER": str(directory)}),
            start_timeout=20.0,
            payload=payload,
        )
        size = elastic.np or elastic.min_np
        console = Console(size, directory=str(directory / "logs"), python=True)
        self.job = ElasticJob(
            spec, elastic, console, elastic_timeout=timeout, coordinator=make
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.outcome = self.job.run()

    def end(self, limit: float = 40.0) -> Outcome:
        self._thread.join(limit)
        assert self.outcome is not None, "the job still runs"
        return self.outcome

    def workers(self) -> list[Worker]:
        return self.job._roster.workers

    def worker(self, number: int) -> Worker:
        return self.workers()[number]

    def pid(self, worker: int) -> int:
        """Waits for a worker that writes its process id to its folder."""
        file = self.directory / f"pid.{worker}"
        settle(lambda: file.exists() and file.read_text().endswith("\n"))
        return int(file.read_text())

    def kill(self, worker: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(worker), number)

    def finish(self) -> Outcome:
        (self.directory / "end").touch()
        return self.end()


# Says who it is, then works until the test makes a file.
WORK = """
echo $$ > $FOLDER/part.$RINGJAX_WORKER
mv $FOLDER/part.$RINGJAX_WORKER $FOLDER/pid.$RINGJAX_WORKER
while [ ! -e $FOLDER/end ]; do sleep 0.02; done
"""


def settle(holds: Callable[[], object], limit: float = 20.0) -> None:
    left = leaks.settle(lambda: [] if holds() else ["not yet"], limit)
    assert not left
