"""A rank's connection to the coordinator; it may come back after a loss.

In an elastic job a thread reads it, and looks for a coordinator that was started anew.
In other jobs it has no thread: whoever waits for a message reads, and a connection that
is lost stays lost. Messages and orders to greet go to the owner; what they mean is not
known here.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from typing import Any, Protocol

from ringjax.control.connecting import reach, watch
from ringjax.control.handshake import LIMIT, Introduction
from ringjax.control.sealing import Keys
from ringjax.control.waiting import readable
from ringjax.errors import AuthenticationError, StartupError

PAUSE = 0.25  # seconds between two attempts to reach the coordinator, at most


class Owner(Protocol):
    """The other half of a client. All of it is called with the lock held."""

    def greeting(self) -> dict[str, Any]:
        """What to say first on a new connection."""

    def hear(self, message: dict[str, Any]) -> None:
        """A message has come."""

    def cut(self) -> None:
        """The connection is lost; it will be looked for unless `finished`."""

    def give_up(self, text: str) -> None:
        """It could not be found again."""

    def finished(self) -> bool:
        """Whether nothing is to be heard any more."""


class _Wire:
    """One authenticated connection."""

    def __init__(self, sock: socket.socket, keys: Keys) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._sealer, self._opener = keys.sealer(), keys.opener()
        self.output = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Writes what is possible now. An error is noticed by whoever reads."""
        self.output += self._sealer.seal(message)
        self.write()

    def write(self) -> None:
        with contextlib.suppress(OSError):
            while self.output:
                del self.output[: self.sock.send(self.output[: 1 << 16])]

    def read(self) -> list[dict[str, Any]]:
        """Raises OSError or AuthenticationError when the connection is over."""
        try:
            piece = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
        if not piece:
            raise ConnectionResetError("it closed the connection")
        return self._opener.feed(piece)


class Connection:
    """Keeps one connection.

    Args:
        addresses: of the coordinator: "host:port,...", tried in turn.
        secret: the job's secret.
        introduction: which rank or worker calls.
        silence: seconds of silence on the wire until it counts as lost; 0: no matter.
        patience: seconds to look for the coordinator then, in a thread; 0: no thread.
    """

    def __init__(
        self,
        addresses: str,
        secret: bytes,
        introduction: Introduction,
        silence: float = 0.0,
        patience: float = 0.0,
    ) -> None:
        self._addresses, self._secret = addresses, secret
        self._introduction = introduction
        self._silence, self._patience = silence, patience
        self._wire: _Wire | None = None
        self._owner: Owner | None = None
        self._lock: threading.Condition | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._wakeup = -1

    @property
    def comes_back(self) -> bool:
        """Whether it is built up again after a loss."""
        return self._patience > 0

    def _open(self, deadline: float) -> tuple[_Wire, str]:
        sock, keys, where = reach(
            self._addresses, self._secret, self._introduction, deadline
        )
        if self._silence > 0:
            watch(sock, self._silence)
        return _Wire(sock, keys), where

    def open(self, owner: Owner, lock: threading.Condition, deadline: float) -> str:
        """Connects and greets; tries each address once.

        Returns:
            Where it leads to, for errors.

        Raises:
            AuthenticationError: what answers cannot prove itself.
            StartupError: this host has no loopback interface that is up.
            OSError: nobody answers.
        """
        wire, where = self._open(deadline)
        with lock:
            self._owner, self._lock, self._wire = owner, lock, wire
            self.send(owner.greeting())
        return where

    def read(self, deadline: float) -> bool:
        """Hands the owner what comes next; False if nothing has until the deadline.

        For a connection without a thread, or before `serve`.

        Raises:
            OSError, AuthenticationError: the connection is lost.
        """
        wire, owner, lock = self._wire, self._owner, self._lock
        if wire is None or owner is None or lock is None:
            raise ConnectionAbortedError("the connection is closed")
        left = max(0.0, deadline - time.monotonic())
        try:
            if not _wait(wire, left):
                return False
            messages = wire.read()
        except ValueError:  # another thread has closed the socket
            raise ConnectionAbortedError("the connection is closed") from None
        except (OSError, AuthenticationError):
            self._lose(owner, lock)
            raise
        with lock:
            wire.write()
            for message in messages:
                owner.hear(message)
        return True

    def serve(self) -> None:
        """From now on a thread reads, and connects again after a loss."""
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._serve, name="ringjax-coordinator-line", daemon=True
        )
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends if there is a connection; with the lock held. Does not wait."""
        wire = self._wire
        if wire is not None:
            wire.send(message)
            if wire.output and self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _serve(self) -> None:
        owner, lock = self._owner, self._lock
        assert owner is not None and lock is not None
        while not self._closing:
            with lock:
                if owner.finished():
                    break
            wire = self._wire or self._find(owner, lock)
            if wire is None:
                continue
            try:
                _wait(wire, None, self._wakeup)
                messages = wire.read()
            except (OSError, AuthenticationError):
                self._lose(owner, lock)
                continue
            with lock:
                wire.write()
                try:
                    for message in messages:
                        owner.hear(message)
                except Exception as error:  # nobody else would hear of it
                    why = f"{type(error).__name__}: {error}"
                    owner.give_up(f"what the coordinator said failed here: {why}")
                    break
        self._lose(owner, lock)

    def _find(self, owner: Owner, lock: threading.Condition) -> _Wire | None:
        """Looks for the coordinator; None if nobody wants to know any more."""
        deadline, pause = time.monotonic() + self._patience, 0.02
        while not self._closing:
            # The right server may come although a stranger sits on its port now, or
            # the loopback interface is down.
            with contextlib.suppress(OSError, StartupError):
                self.open(owner, lock, deadline)
                return self._wire
            if time.monotonic() + pause >= deadline:
                with lock:
                    owner.give_up(f"the coordinator was gone for {self._patience:g} s")
                return None
            readable(self._wakeup, pause)
            pause = min(2 * pause, PAUSE)
        return None

    def _lose(self, owner: Owner, lock: threading.Condition) -> None:
        with lock:
            wire, self._wire = self._wire, None
            owner.cut()
        if wire is not None:
            wire.sock.close()

    def drain(self, seconds: float) -> None:
        """Waits until everything is written, but not for long; without the lock."""
        deadline = time.monotonic() + seconds
        while (wire := self._wire) is not None and wire.output:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
            with self._lock or contextlib.nullcontext():
                wire.write()

    def close(self) -> None:
        """Ends the thread and closes the connection. May be called twice."""
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            os.eventfd_write(self._wakeup, 1)
            self._thread.join(LIMIT)
        with self._lock or contextlib.nullcontext():  # `send` may be waking the thread
            self.release()

    def release(self) -> None:
        """Closes all sockets without the thread, which a forked child does not have."""
        self._closing = True
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.sock.close()
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1


def _wait(wire: _Wire, seconds: float | None, wakeup: int = -1) -> bool:
    """Whether there is something to read, or room for output, or `wakeup` was rung."""
    poll = select.poll()
    poll.register(wire.sock, select.POLLIN | (select.POLLOUT * bool(wire.output)))
    if wakeup >= 0:
        poll.register(wakeup, select.POLLIN)
    found = poll.poll(None if seconds is None else 1000 * seconds)
    if (wakeup, select.POLLIN) in found:
        os.eventfd_read(wakeup)
    return bool(found)
