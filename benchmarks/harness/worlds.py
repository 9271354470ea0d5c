"""Starts the ranks of each peer as users do, and sends requests to all ranks.

All worlds exist at the same time, and only one world works at a time. worker.py
executes requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from benchmarks.harness.launchers import Launch
from benchmarks.peers.adapter import KINDS

ROOT = Path(__file__).resolve().parents[2]
START_UP = 120.0  # seconds until all ranks of a world must have sent a hello
ANSWER = 300.0  # seconds until a request must have a reply
END = 15.0


def close_when_terminated() -> None:
    """Makes SIGTERM end this program like Ctrl-C, which wakes stopped ranks up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class WorldError(RuntimeError):
    """Error: a peer does not start, or has failed; the text contains the reason."""


class World:
    """The ranks of one peer.

    Args:
      peer: a key of PEERS.
      ranks: the number of ranks.
      folder: the folder for the socket and the log.
      launch: the way in which the ranks are started.
    """

    def __init__(self, peer: str, ranks: int, folder: Path, launch: Launch) -> None:
        self.peer = peer
        self._environment = {"JAX_PLATFORMS": "cpu", **os.environ}
        # Another Python must not see the packages of this Python.
        if launch.python != sys.executable:
            self._environment.pop("PYTHONPATH", None)
        self._environment |= launch.environment
        self._restless = launch.restless
        self._pids: list[int] = []
        self._log = folder / f"{peer}.log"
        path = str(folder / f"{peer}.socket")
        worker = [launch.python, "-m", "benchmarks.harness.worker", path, peer]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(ranks)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._streams: list[Any] = []
        try:
            for command in _commands(ranks, worker, launch):
                self._processes.append(self._start(command))
            hellos = [self._accept() for _ in range(ranks)]
        # End the ranks after Ctrl-C, too, because they do not get Ctrl-C.
        except BaseException as error:
            self.close()
            if isinstance(error, WorldError | OSError | ValueError):
                raise WorldError(f"{peer}: {error}") from None
            raise
        self.version: str = hellos[0]["version"]
        self.variants: dict[str, list[str]] = {k: hellos[0][k] for k in KINDS}
        self.dtypes: list[str] = hellos[0]["dtypes"]
        self.networks: list[str] = hellos[0]["networks"]
        self._pids = [hello["pid"] for hello in hellos]
        self._rest()

    def request(self, **message: Any) -> list[dict[str, Any]]:
        """Sends a request to every rank and returns the replies.

        Raises:
          WorldError: a rank failed, died or is late.
        """
        replies = []
        self._wake()
        try:
            for stream in self._streams:
                print(json.dumps(message), file=stream, flush=True)
            for stream in self._streams:
                replies.append(json.loads(stream.readline() or "null"))
        except OSError as error:
            raise WorldError(f"{self.peer}: {error}\n{self._tail()}") from None
        finally:
            self._rest()
        if None in replies:
            raise WorldError(f"{self.peer}: a rank has ended\n{self._tail()}")
        errors = [a["error"] for a in replies if "error" in a]
        if errors:
            raise WorldError(f"{self.peer}: {errors[0]}")
        return replies

    def close(self) -> None:
        """Waits for the end of the ranks, and ends ranks that do not end."""
        self._wake()
        self._listener.close()
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()
        deadline = time.monotonic() + (END if self._streams else 0)
        for sig in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
            for process in self._processes:
                if process.poll() is None:
                    os.killpg(process.pid, sig)
            deadline = time.monotonic() + END
        for process in self._processes:
            process.wait()

    def _wake(self) -> None:
        self._signal(signal.SIGCONT)

    def _rest(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """Sends SIGSTOP or SIGCONT to ranks that work without a request."""
        for pid in self._pids if self._restless else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A process group of its own gets no Ctrl-C. A session of its own is
                # wrong: Linux divides CPU time between sessions first, so a rank could
                # not yield to other sessions.
                process_group=0,
            )

    def _accept(self) -> dict[str, Any]:
        deadline = time.monotonic() + START_UP
        self._listener.settimeout(0.2)
        while True:
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                break
            if any(p.poll() is not None for p in self._processes):
                raise WorldError(f"a rank has ended\n{self._tail()}")
            if time.monotonic() > deadline:
                raise WorldError(f"not there after {START_UP:g} s\n{self._tail()}")
        connection.settimeout(ANSWER)
        with connection:  # the stream keeps the connection open
            self._streams.append(connection.makefile("rw"))
        hello: dict[str, Any] = json.loads(self._streams[-1].readline())
        return hello

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


def _commands(ranks: int, worker: list[str], launch: Launch) -> list[list[str]]:
    if not launch.each:
        return [[*launch.words, *worker]]
    place = ["--size", str(ranks), "--port", str(machine.free_port())]
    return [[*worker, "--rank", str(rank), *place] for rank in range(ranks)]
