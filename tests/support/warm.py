"""Starts Python programs as forks of a process that has imported their modules.

This is the client of tests/support/warm_server.py. A server has one set of imported
modules, and one set of the environment variables that imports read. A server starts at
its first use. The imports in the text of a program choose the server. With
RINGJAX_TEST_COLD=1 no servers are used.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ringjax.run import environ
from support import leaks, warm_server

# Modules that every program of the tests may import. Ranks import pytest, too.
_CORE = (
    "numpy",
    "pytest",
    "ringjax.eager",
    "ringjax.run.cli",
    "ringjax.run.hosts.agent",
)
_SETS = {
    "": (),
    "jax": ("jax", "jax.numpy", "optax", "ringjax.collectives", "ringjax.optim"),
    "torch": ("torch", "ringjax.torch"),
    "tensorflow": ("tensorflow", "ringjax.tensorflow"),
}
_MAX_SERVERS = 6  # of one pytest process
# A process never loads both TensorFlow and PyTorch (tests/support/frameworks.py), so a
# server imports one framework. A program imports other frameworks itself.
_IMPORTS = {
    "tensorflow": r"(ringjax\.)?tensorflow",
    "torch": r"(ringjax\.)?torch",
    "keras": r"(ringjax\.)?keras",
    "jax": r"jax|optax|flax",
}


class Process:
    """A program that a warm server has forked, with those methods of Popen we use."""

    def __init__(self, answers: socket.socket, words: Sequence[str]) -> None:
        self.args = words
        self.returncode: int | None = None
        self._answers, self._lock = answers, threading.Lock()
        answer = self._answer()
        if "pid" not in answer:
            answers.close()
            raise OSError(answer.get("error", "the warm server of ranks has ended"))
        self.pid: int = answer["pid"]

    def _answer(self) -> dict[str, int]:
        text = self._answers.recv(1 << 12)
        return json.loads(text) if text else {}

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code. Raises subprocess.TimeoutExpired."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        """Returns the exit code, or None while the program runs."""
        with self._lock:  # two threads of a test may poll and wait at the same time
            if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
                self.returncode = self._answer().get("code", -signal.SIGKILL)
                self._answers.close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the program."""
        self.send_signal(signal.SIGKILL)


Program = Process | subprocess.Popen[bytes]
"""A program that a test has started, by a warm server or directly."""


class _Server:
    """The client of one server process, which imports `modules` and forks programs."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._programs: list[Process] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        room = "x" * warm_server.ROOM
        kept = {k: v for k, v in env.items() if not k.startswith("RINGJAX_T")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", warm_server.__file__, str(theirs.fileno()),
                 json.dumps(modules), room],
                env={**kept, warm_server.ROOM_VARIABLE: room},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )  # fmt: skip
        leaks.ignore_child(self._process.pid, self._socket.fileno())

    def start(
        self, words: Sequence[str], env: Mapping[str, str], files: Sequence[int],
        session: bool,
    ) -> Process:  # fmt: skip
        """Asks the server to fork a program with `files` as descriptors 0, 1 and 2."""
        order = {"words": words, "env": env, "cwd": os.getcwd(), "session": session}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = [*files, theirs.fileno()]
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
        self._programs = [old for old in self._programs if old.poll() is None]
        try:
            self._programs.append(Process(ours, words))
        except OSError as error:
            self._log.seek(0)
            raise OSError(f"{error}\n{self._log.read().decode()}") from None
        return self._programs[-1]

    def idle(self) -> bool:
        """Returns whether no program of this server runs."""
        return all(program.poll() is not None for program in self._programs)

    def close(self) -> None:
        """Ends the server. Its programs continue to run."""
        leaks.stop_ignoring(self._process.pid)
        self._socket.close()
        self._process.wait()
        self._log.close()


_servers: dict[tuple[object, ...], _Server] = {}


def start(
    words: Sequence[str],
    env: Mapping[str, str],
    *,
    stdout: IO[bytes],
    stderr: IO[bytes] | None = None,
    text: str | None = "",
    session: bool = False,
) -> Program:
    """Starts a program: by a fork of a warm server if possible, otherwise directly.

    Args:
      words: the command.
      env: the whole environment of the program.
      stdout, stderr: files for its output; stderr goes to stdout if not given.
      text: the source of the program, or of the program that it starts. The imports in
        the text choose the server. None: start without a server.
      session: whether the program runs in a new session, as from a terminal.
    """
    files = [stdout.fileno(), (stderr or stdout).fileno()]
    if (
        text is None
        or "RINGJAX_TEST_COLD" in os.environ
        or not warm_server.can_fork(words, env, env)
    ):
        return subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=files[0], stderr=files[1],
            start_new_session=session,
        )  # fmt: skip
    with open(os.devnull, "rb") as nothing:
        files = [nothing.fileno(), *files]
        return _server(framework(text, env), env).start(words, env, files, session)


def _server(framework: str, env: Mapping[str, str]) -> _Server:
    env = {**environ.rank_defaults(), **env}  # ringrun sets these defaults, too
    fixed = warm_server.fixed(env)
    key = (framework, *sorted(fixed.items()))
    server = _servers.pop(key, None)
    if server is None:
        # Servers need much memory, so end the idle server that was used least recently.
        for old in [k for k, s in _servers.items() if s.idle()][
            : max(0, len(_servers) + 1 - _MAX_SERVERS)
        ]:
            _servers.pop(old).close()
        server = _Server((*_CORE, *_SETS[framework]), env)
    _servers[key] = server
    return server


def framework(text: str, env: Mapping[str, str]) -> str:
    for name, pattern in _IMPORTS.items():
        statement = rf"^\s*(?:import|from) (?:{pattern})\b|in_ranks\(\"(?:{pattern})\b"
        if re.search(statement, text, re.MULTILINE):
            if name == "keras":
                said = re.search(r"KERAS_BACKEND\W+(\w+)", text)
                return said[1] if said else env.get("KERAS_BACKEND", "tensorflow")
            return name
    return ""


@functools.cache
def sources(path: Path) -> str:
    """Returns the text of a test file and of the files of tests/support it imports."""
    found, waiting = {path: path.read_text()}, [path]
    while waiting:
        text = found[waiting.pop()]
        names = re.findall(r"^from support\.(\w+) import", text, re.MULTILINE)
        for line in re.findall(r"^from support import (.*)", text, re.MULTILINE):
            names += re.findall(r"\w+", line)
        for name in names:
            other = Path(__file__).with_name(f"{name}.py")
            if other.exists() and other not in found:
                found[other] = other.read_text()
                waiting.append(other)
    return "\n".join(found.values())


def end_servers() -> None:
    """Ends all servers at the end of the pytest session."""
    while _servers:
        _servers.popitem()[1].close()
