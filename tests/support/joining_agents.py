"""Starts `ringrun --listen` and agents (`ringrun --join`) of a job on this machine."""

from __future__ import annotations

import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from ringjax.control import addresses
from support import leaks
from support.elastic_member import MEMBER_PROGRAM
from support.launch import environment
from support.waiting import LONG

RINGRUN = [sys.executable, "-P", "-m", "ringjax.run"]


def _free_port_pair() -> int:
    """Returns a free port whose successor is free, too."""
    while True:
        port = random.randrange(20000, 30000)
        try:
            for number in (port, port + 1):
                addresses.listen("127.0.0.1", number).close()
        except OSError:
            continue
        return port


class JoinableJob:
    """A job that agents join. ringrun and agents may be started several times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[Process] = []
        self.id = uuid.uuid4().hex[:12]
        self.port = _free_port_pair()
        self.secret = secrets.token_bytes(32)
        self._count = 0
        (folder / "script.py").write_text(MEMBER_PROGRAM)
        self.rank = [sys.executable, "-P", str(folder / "script.py")]

    def start(self, *words: str, **env: str) -> Process:
        self._count += 1
        log = self.folder / f"{self._count}.log"
        variables = {
            "RINGJAX_SECRET": self.secret.hex(),
            "FOLDER": str(self.folder),
            "RINGJAX_FAILURE_TIMEOUT": "20",
            **env,
        }
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*RINGRUN, *words],
                env=environment(self.id, variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(Process(process, log))
        return self._started[-1]

    def listen(self, *words: str, **env: str) -> Process:
        return self.start("--listen", f"127.0.0.1:{self.port}", *words, **env)

    def join(
        self, host: str, slots: int = 1, *words: str, port: int = 0, **env: str
    ) -> Process:
        where = ["--join", f"localhost:{port or self.port}", "--slots", str(slots)]
        return self.start(*where, *words, **{"RINGJAX_HOSTNAME": host, **env})

    def pids(self, worker: int) -> list[int]:
        """Returns the process ids of a worker of the job."""
        number = f"RINGJAX_WORKER={worker}".encode()
        return [
            pid
            for pid, text in leaks.processes(self.id).items()
            if "script.py" in text
            and "ringjax.run" not in text
            and number in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ]

    def end(self) -> None:
        (self.folder / "end").touch()

    def close(self) -> list[str]:
        found = leaks.settle(lambda: list(leaks.processes(self.id).values()), 10)
        for pid in leaks.processes(self.id):
            os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()
        return found


class Process:
    """A ringrun process and its output."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def lines(self, word: str) -> list[str]:
        return [line for line in self.output.splitlines() if word in line]

    def wait_for(
        self,
        text: str,
        count: int = 1,
        seconds: float = LONG,
        also: Sequence[Process] = (),
    ) -> None:
        """Waits until a regular expression matches `count` times in the output.

        Args:
            also: more processes whose outputs count. While ringrun is not running, an
                agent writes the output of its ranks to its own output.
        """
        deadline = time.monotonic() + seconds
        while len(re.findall(text, found := self._with(also))) < count:
            assert time.monotonic() < deadline, f"no {text!r} in\n{found}"
            time.sleep(0.02)

    def _with(self, others: Sequence[Process]) -> str:
        return "\n".join(process.output for process in (self, *others))

    def kill(self, number: int = signal.SIGKILL) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = LONG) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs\n{self.output}") from None
