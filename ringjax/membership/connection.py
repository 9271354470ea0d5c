"""A rank's connection to the coordinator; it may come back after a loss.

In an elastic job a thread reads it, and looks for a coordinator that was started anew.
In other jobs it has no thread: whoever waits for a message reads, and a connection that
is lost stays lost. Messages go to the handler; what they mean is not known here.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from typing import Any, Protocol

from ringjax.control.connecting import connect_to_server, enable_keepalive
from ringjax.control.handshake import HANDSHAKE_TIMEOUT, HandshakeRequest
from ringjax.control.polling import wait_readable
from ringjax.control.sealed_messages import SessionKeys
from ringjax.errors import AuthenticationError, StartupError

MAX_PAUSE = 0.25  # seconds between two attempts to reach the coordinator, at most


class ConnectionHandler(Protocol):
    """The other half of a client. All of it is called with the lock held."""

    def hello_message(self) -> dict[str, Any]:
        """What to say first on a new connection."""

    def on_message(self, message: dict[str, Any]) -> None:
        """A message has come."""

    def on_disconnected(self) -> None:
        """The connection is lost; it will be looked for unless `finished`."""

    def give_up(self, text: str) -> None:
        """It could not be found again."""

    def is_finished(self) -> bool:
        """Whether nothing is to be heard any more."""


class _Stream:
    """One authenticated connection."""

    def __init__(self, sock: socket.socket, keys: SessionKeys) -> None:
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
        silence: seconds of silence on the stream until it counts as lost; 0: no matter.
        patience: seconds to look for the coordinator then, in a thread; 0: no thread.
    """

    def __init__(
        self,
        addresses: str,
        secret: bytes,
        introduction: HandshakeRequest,
        silence: float = 0.0,
        reconnect_timeout: float = 0.0,
    ) -> None:
        self._addresses, self._secret = addresses, secret
        self._introduction = introduction
        self._silence, self._reconnect_timeout = silence, reconnect_timeout
        self._stream: _Stream | None = None
        self._handler: ConnectionHandler | None = None
        self._lock: threading.Condition | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._wakeup = -1

    @property
    def reconnects(self) -> bool:
        """Whether it is built up again after a loss."""
        return self._reconnect_timeout > 0

    def _open(self, deadline: float) -> tuple[_Stream, str]:
        sock, keys, where = connect_to_server(
            self._addresses, self._secret, self._introduction, deadline
        )
        if self._silence > 0:
            enable_keepalive(sock, self._silence)
        return _Stream(sock, keys), where

    def open(
        self, handler: ConnectionHandler, lock: threading.Condition, deadline: float
    ) -> str:
        """Connects and greets; tries each address once.

        Returns:
            Where it leads to, for errors.

        Raises:
            AuthenticationError: what answers cannot prove itself.
            StartupError: this host has no loopback interface that is up.
            OSError: nobody answers.
        """
        stream, where = self._open(deadline)
        with lock:
            self._handler, self._lock, self._stream = handler, lock, stream
            self.send(handler.hello_message())
        return where

    def read(self, deadline: float) -> bool:
        """Hands the handler what comes next; False if nothing has until the deadline.

        For a connection without a thread, or before `serve`.

        Raises:
            OSError, AuthenticationError: the connection is lost.
        """
        stream, handler, lock = self._stream, self._handler, self._lock
        if stream is None or handler is None or lock is None:
            raise ConnectionAbortedError("the connection is closed")
        left = max(0.0, deadline - time.monotonic())
        try:
            if not _wait(stream, left):
                return False
            messages = stream.read()
        except ValueError:  # another thread has closed the socket
            raise ConnectionAbortedError("the connection is closed") from None
        except (OSError, AuthenticationError):
            self._drop(handler, lock)
            raise
        with lock:
            stream.write()
            for message in messages:
                handler.on_message(message)
        return True

    def start_thread(self) -> None:
        """From now on a thread reads, and connects again after a loss."""
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._serve, name="ringjax-coordinator-line", daemon=True
        )
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends if there is a connection; with the lock held. Does not wait."""
        stream = self._stream
        if stream is not None:
            stream.send(message)
            if stream.output and self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _serve(self) -> None:
        handler, lock = self._handler, self._lock
        assert handler is not None and lock is not None
        while not self._closing:
            with lock:
                if handler.is_finished():
                    break
            stream = self._stream or self._reconnect(handler, lock)
            if stream is None:
                continue
            try:
                _wait(stream, None, self._wakeup)
                messages = stream.read()
            except (OSError, AuthenticationError):
                self._drop(handler, lock)
                continue
            with lock:
                stream.write()
                try:
                    for message in messages:
                        handler.on_message(message)
                except Exception as error:  # nobody else would hear of it
                    why = f"{type(error).__name__}: {error}"
                    handler.give_up(f"what the coordinator said failed here: {why}")
                    break
        self._drop(handler, lock)

    def _reconnect(
        self, handler: ConnectionHandler, lock: threading.Condition
    ) -> _Stream | None:
        """Looks for the coordinator; None if nobody wants to know any more."""
        deadline, pause = time.monotonic() + self._reconnect_timeout, 0.02
        while not self._closing:
            # The right server may come although a stranger sits on its port now, or
            # the loopback interface is down.
            with contextlib.suppress(OSError, StartupError):
                self.open(handler, lock, deadline)
                return self._stream
            if time.monotonic() + pause >= deadline:
                with lock:
                    handler.give_up(
                        f"the coordinator was gone for {self._reconnect_timeout:g} s"
                    )
                return None
            wait_readable(self._wakeup, pause)
            pause = min(2 * pause, MAX_PAUSE)
        return None

    def _drop(self, handler: ConnectionHandler, lock: threading.Condition) -> None:
        with lock:
            stream, self._stream = self._stream, None
            handler.on_disconnected()
        if stream is not None:
            stream.sock.close()

    def drain(self, seconds: float) -> None:
        """Waits until everything is written, but not for long; without the lock."""
        deadline = time.monotonic() + seconds
        while (stream := self._stream) is not None and stream.output:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
            with self._lock or contextlib.nullcontext():
                stream.write()

    def close(self) -> None:
        """Ends the thread and closes the connection. May be called twice."""
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            os.eventfd_write(self._wakeup, 1)
            self._thread.join(HANDSHAKE_TIMEOUT)
        with self._lock or contextlib.nullcontext():  # `send` may be waking the thread
            self.close_in_child()

    def close_in_child(self) -> None:
        """Closes all sockets without the thread, which a forked child does not have."""
        self._closing = True
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.sock.close()
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1


def _wait(stream: _Stream, seconds: float | None, wakeup: int = -1) -> bool:
    """Whether there is something to read, or room for output, or `wakeup` was rung."""
    poll = select.poll()
    poll.register(stream.sock, select.POLLIN | (select.POLLOUT * bool(stream.output)))
    if wakeup >= 0:
        poll.register(wakeup, select.POLLIN)
    found = poll.poll(None if seconds is None else 1000 * seconds)
    if (wakeup, select.POLLIN) in found:
        os.eventfd_read(wakeup)
    return bool(found)
