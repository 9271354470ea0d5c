"""An elastic job without ringrun: a coordinator in the test process, and workers.

Tests of workers use this module. Tests of the launcher use `start_job`.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ringjax.membership.coordinator import Coordinator
from ringjax.run.environ import rank_defaults
from support import leaks, warm
from support.launch import JobError, environment

# The first lines of every worker's script. `say` writes a line without buffering.
HEAD = """
import os, signal, sys, time
import numpy as np
import ringjax
from ringjax import runtime

WORKER = int(os.environ["RINGJAX_WORKER"])
# Background programs of a shell ignore SIGINT, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

ringjax.init()
"""


class ElasticJob:
    """Workers 0, 1, 2, … of one script.

    Args:
        folder: an empty folder for the script and the logs.
        np: the number of workers that start the job.
        script: Python source that follows HEAD.
        env: additional variables for the workers.
        hosts: the number of hosts that the workers name in turns; 0 for one real host.
        limits: further arguments of `Coordinator`.
    """

    def __init__(
        self,
        folder: Path,
        np: int,
        script: str,
        env: Mapping[str, str] | None = None,
        hosts: int = 0,
        **limits: Any,
    ) -> None:
        self._hosts = hosts
        self.id = uuid.uuid4().hex[:12]
        self._folder, self._env, self.np = folder, dict(env or {}), np
        self._script = folder / "script.py"
        self._script.write_text(HEAD + textwrap.dedent(script))
        self.secret, self.job = secrets.token_bytes(32), secrets.token_hex(8)
        settings: dict[str, Any] = {"min_np": 1, "start_timeout": 60.0}
        self.coordinator = Coordinator(
            self.secret, self.job, np=np, **{**settings, **limits}
        )
        self.coordinator.start()
        self.workers: dict[int, warm.Program] = {}
        self.events: list[tuple[Any, ...]] = []
        self._watchers: list[threading.Thread] = []
        for _ in range(np):
            self.add()

    def add(self) -> int:
        """Starts another worker; returns its number."""
        worker = len(self.workers)
        variables = {
            "RINGJAX_ELASTIC": "1",
            "RINGJAX_WORKER": str(worker),
            "RINGJAX_RANK": str(min(worker, self.np - 1)),
            "RINGJAX_SIZE": str(self.np),
            "RINGJAX_LOCAL_RANK": str(min(worker, self.np - 1)),
            "RINGJAX_LOCAL_SIZE": str(self.np),
            "RINGJAX_RENDEZVOUS": ",".join(self.coordinator.addresses),
            "RINGJAX_SECRET": self.secret.hex(),
            "RINGJAX_JOB": self.job,
            **self._env,
        }
        if self._hosts:
            variables["RINGJAX_HOSTNAME"] = f"host{worker % self._hosts}"
        self.coordinator.expected(worker)
        with (
            (self._folder / f"{worker}.out").open("wb") as out,
            (self._folder / f"{worker}.err").open("wb") as err,
        ):
            process = warm.start(
                [sys.executable, "-P", str(self._script)],
                environment(self.id, {**rank_defaults(), **variables}),
                stdout=out,
                stderr=err,
                text=self._script.read_text(),
            )
        self.workers[worker] = process
        watcher = threading.Thread(target=self._watch, args=(worker, process))
        watcher.start()
        self._watchers.append(watcher)
        return worker

    def _watch(self, worker: int, process: warm.Program) -> None:
        code = process.wait()
        self.coordinator.process_ended(worker, f"its process ended with {code}")

    def kill(self, worker: int, sig: signal.Signals = signal.SIGKILL) -> float:
        """Sends a signal. Returns the time just before it, by `time.time()`."""
        now = time.time()
        self.workers[worker].send_signal(sig)
        return now

    def create_flag(self, word: str) -> None:
        """Creates the file `sys.argv[0] + ".WORD"`, for which the script waits."""
        self._script.with_name(f"{self._script.name}.{word}").touch()

    def output(self, worker: int) -> str:
        """Returns the standard output of a worker."""
        return (self._folder / f"{worker}.out").read_text(errors="replace")

    def errors(self, worker: int) -> str:
        """Returns the standard error of a worker."""
        return (self._folder / f"{worker}.err").read_text(errors="replace")

    def lines(self, worker: int, word: str) -> list[list[str]]:
        """Returns the other words of each complete line that begins with `word`."""
        text = self.output(worker)
        found = text[: text.rfind("\n") + 1].splitlines()
        return [line.split()[1:] for line in found if line.split(" ")[0] == word]

    def wait_for(
        self, check: Callable[[], bool], what: str, seconds: float = 40
    ) -> None:
        """Waits for a condition, for at most 5 s after all workers have ended."""
        deadline = time.monotonic() + seconds
        while not check():
            if all(process.poll() is not None for process in self.workers.values()):
                deadline = min(deadline, time.monotonic() + 5)
            if time.monotonic() > deadline:
                raise JobError(f"never: {what}\n{self.logs()}")
            time.sleep(0.005)

    def wait_for_line(self, worker: int, word: str, count: int = 1) -> None:
        """Waits until a worker has written `count` lines that begin with `word`."""
        self.wait_for(
            lambda: len(self.lines(worker, word)) >= count,
            f"worker {worker} writes {count} x {word!r}",
        )

    def wait(self, worker: int, seconds: float = 40) -> int:
        """Waits for the end of a worker and returns its exit code."""
        self.wait_for(
            lambda: self.workers[worker].poll() is not None,
            f"worker {worker} ends",
            seconds,
        )
        code = self.workers[worker].poll()
        assert code is not None
        return code

    def all_events(self) -> list[tuple[Any, ...]]:
        """Returns all events of the coordinator so far."""
        while not self.coordinator.events.empty():
            self.events.append(self.coordinator.events.get())
        return self.events

    def logs(self, tail: int = 3000) -> str:
        """Returns the coordinator's events and all workers' output, for error texts."""
        parts = [f"events: {self.all_events()}"]
        for worker in self.workers:
            code = self.workers[worker].poll()
            parts.append(f"--- worker {worker} (exit code {code})")
            parts += [self.output(worker)[-tail:], self.errors(worker)[-tail:]]
        return "\n".join(parts)

    def end_with_stacks(self) -> None:
        """Ends the running workers, which first write the stacks of their threads."""
        for process in self.workers.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                os.kill(process.pid, signal.SIGABRT)
        for process in self.workers.values():
            process.wait(10)

    def close(self) -> list[str]:
        """Ends everything; returns the processes that outlived their worker."""
        for process in self.workers.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for watcher in self._watchers:
            watcher.join(10)
        self.coordinator.close()
        return leaks.settle(lambda: list(leaks.processes(self.id).values()))


Start = Callable[..., ElasticJob]
"""The fixture `start`. It takes the arguments of ElasticJob except the folder."""


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts elastic jobs, and ends them after the test."""
    started: list[ElasticJob] = []

    def begin(np: int, script: str, **more: Any) -> ElasticJob:
        folder = tmp_path_factory.mktemp("job")
        started.append(ElasticJob(folder, np, script, **more))
        return started[-1]

    yield begin
    left = [text for job in started for text in job.close()]
    assert not left, "\n".join(left)
