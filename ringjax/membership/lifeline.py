"""A connection to a server that comes back when the server was started anew.

A thread reads it; messages and orders to greet go to whoever owns it. What is said over
it is not known here.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from typing import Any, Protocol

from ringjax.control.handshake import LIMIT, Introduction
from ringjax.control.sealing import Keys
from ringjax.control.session import reach, watch
from ringjax.control.waiting import readable
from ringjax.errors import AuthenticationError, StartupError

PAUSE = 0.5  # seconds between two attempts to reach the server, at most


class Owner(Protocol):
    """Who has a lifeline. All of it is called with the lock held."""

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
            raise ConnectionResetError("the server closed the connection")
        return self._opener.feed(piece)


class Lifeline:
    """Keeps one connection.

    Args:
        addresses: of the server: "host:port,...", tried in turn.
        secret: the job's secret.
        introduction: who this is.
        server: what the server is called in errors.
        silence: seconds of silence on the wire until it counts as lost.
        patience: seconds to look for it then.
    """

    def __init__(
        self,
        addresses: str,
        secret: bytes,
        introduction: Introduction,
        *,
        server: str,
        silence: float,
        patience: float,
    ) -> None:
        self._addresses, self._secret = addresses, secret
        self._introduction, self._server = introduction, server
        self._silence, self._patience = silence, patience
        self._wire: _Wire | None = None
        self._owner: Owner | None = None
        self._lock: threading.Condition | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def dial(self, deadline: float) -> None:
        """Connects for the first time; tries until the deadline.

        Raises:
            AuthenticationError: what answers cannot prove itself.
            StartupError: this host has no loopback interface that is up.
            OSError: nobody answers.
        """
        pause = 0.02
        while self._wire is None:
            try:
                self._wire = self._open(deadline)
            except OSError:
                if time.monotonic() + pause >= deadline:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, PAUSE)

    def _open(self, deadline: float) -> _Wire:
        sock, keys, _ = reach(
            self._addresses, self._secret, self._introduction, deadline, self._server
        )
        watch(sock, self._silence)
        return _Wire(sock, keys)

    def start(self, owner: Owner, lock: threading.Condition) -> None:
        """Greets, and reads from now on."""
        self._owner, self._lock = owner, lock
        with lock:
            self.send(owner.greeting())
        self._thread = threading.Thread(
            target=self._serve,
            args=(owner, lock),
            name=f"ringjax-{self._server}-line",
            daemon=True,
        )
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends if there is a connection; with the lock held. Does not wait."""
        wire = self._wire
        if wire is not None:
            wire.send(message)
            if wire.output and self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _serve(self, owner: Owner, lock: threading.Condition) -> None:
        while not self._closing:
            with lock:
                if owner.finished():
                    break
            wire = self._wire or self._find(owner, lock)
            if wire is None:
                continue
            try:
                self._wait(wire)
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
                    owner.give_up(f"what the {self._server} said failed here: {why}")
                    break
        self._lose(owner, lock)

    def _wait(self, wire: _Wire) -> None:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.register(wire.sock, select.POLLIN | (select.POLLOUT * bool(wire.output)))
        for fd, _ in poll.poll():
            if fd == self._wakeup:
                os.eventfd_read(self._wakeup)

    def _find(self, owner: Owner, lock: threading.Condition) -> _Wire | None:
        """Looks for the server; None if nobody wants to know any more."""
        deadline, pause = time.monotonic() + self._patience, 0.02
        while not self._closing:
            # The right server may come although a stranger sits on its port now, or
            # the loopback interface is down.
            with contextlib.suppress(OSError, StartupError):
                wire = self._open(deadline)
                with lock:
                    self._wire = wire
                    self.send(owner.greeting())
                return wire
            if time.monotonic() + pause >= deadline:
                with lock:
                    text = f"the {self._server} was gone for {self._patience:g} s"
                    owner.give_up(text)
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

    def close(self) -> None:
        """Ends the thread and closes the connection. May be called twice."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wakeup, 1)
        if self._thread is not None:
            self._thread.join(LIMIT)
        with self._lock or contextlib.nullcontext():  # `send` may be waking the thread
            self.release()

    def release(self) -> None:
        """Closes all sockets without the thread, which a forked child does not have."""
        self._closing = True
        if self._wire is not None:
            self._wire.sock.close()
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1
