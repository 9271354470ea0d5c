"""The socket between a worker and the coordinator; a lost connection may be replaced.

In an elastic job a thread reads the connection, and reconnects after the coordinator
was restarted. In other jobs there is no thread: a caller that waits for a message reads
the connection, and a lost connection is not replaced. The handler (client.py)
interprets the messages.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from typing import Protocol

from ringjax.control.addresses import enable_keepalive
from ringjax.control.connecting import connect_to_server
from ringjax.control.handshake import HANDSHAKE_TIMEOUT, HandshakeRequest
from ringjax.control.member import JsonObject
from ringjax.control.polling import wait_readable
from ringjax.control.sealed_messages import SessionKeys
from ringjax.errors import AuthenticationError, StartupError
from ringjax.membership.job_credentials import JobCredentials

MAX_PAUSE = 0.25  # the most seconds between two attempts to connect


class ConnectionHandler(Protocol):
    """Receives the events of a connection. The connection holds its lock meanwhile."""

    def hello_message(self) -> JsonObject:
        """Returns the first message on a new connection."""

    def on_message(self, message: JsonObject) -> None:
        """Handles a message from the coordinator."""

    def on_disconnected(self) -> None:
        """Handles a lost connection. In an elastic job, the thread then reconnects."""

    def give_up(self, text: str) -> None:
        """Handles a lost connection that will not be restored. `text` is the reason."""

    def is_finished(self) -> bool:
        """Returns whether the worker has left the job and needs no connection."""


class _Stream:
    """An authenticated socket, and the keys that encrypt and verify its messages."""

    def __init__(self, sock: socket.socket, keys: SessionKeys) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._sealer, self._opener = keys.sealer(), keys.opener()
        self.output = bytearray()

    def send(self, message: JsonObject) -> None:
        """Sends without waiting. Ignores socket errors, because `read` raises them."""
        self.output += self._sealer.seal(message)
        self.write()

    def write(self) -> None:
        with contextlib.suppress(OSError):
            while self.output:
                del self.output[: self.sock.send(self.output[: 1 << 16])]

    def read(self) -> list[JsonObject]:
        """Reads the messages that have arrived.

        Raises:
            OSError: the connection has ended.
            AuthenticationError: a message is not genuine.
        """
        try:
            piece = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
        if not piece:
            raise ConnectionResetError("it closed the connection")
        return self._opener.feed(piece)


class Connection:
    """The connection to the coordinator. After a loss, a new socket may be opened.

    Call `attach` before any other method.

    Args:
        failure_timeout: seconds of silence after which the kernel ends the connection;
            pass 0 for no limit.
        reconnect_timeout: seconds in which the thread tries to reconnect after a loss;
            pass 0 for a connection without a thread.
    """

    def __init__(
        self,
        credentials: JobCredentials,
        request: HandshakeRequest,
        failure_timeout: float,
        reconnect_timeout: float,
    ) -> None:
        self._credentials, self._request = credentials, request
        self._failure_timeout = failure_timeout
        self._reconnect_timeout = reconnect_timeout
        self._stream: _Stream | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._wakeup = -1

    def attach(self, handler: ConnectionHandler, lock: threading.Condition) -> None:
        """Sets the handler, and the lock that guards both handler and connection."""
        self._handler, self._lock = handler, lock

    @property
    def reconnects(self) -> bool:
        """Whether a thread reconnects after a loss."""
        return self._reconnect_timeout > 0

    def open(self, deadline: float) -> str:
        """Connects and sends the hello. Raises the errors of `connect_to_server`.

        Returns the coordinator and its address, for errors.
        """
        known = self._credentials
        sock, keys, where = connect_to_server(
            known.addresses, known.secret, self._request, deadline
        )
        if self._failure_timeout > 0:
            enable_keepalive(sock, self._failure_timeout)
        stream = _Stream(sock, keys)
        with self._lock:
            self._stream = stream
            self.send(self._handler.hello_message())
        return where

    def read(self, deadline: float) -> bool:
        """Waits for messages and passes them to the handler.

        Call `read` only before `start_thread`, or on a connection without a thread.
        Returns False if no message arrives by the deadline.

        Raises:
            OSError, AuthenticationError: the connection is lost.
        """
        stream = self._stream
        if stream is None:
            raise ConnectionAbortedError("the connection is closed")
        left = max(0.0, deadline - time.monotonic())
        try:
            if not _wait(stream, left):
                return False
            messages = stream.read()
        except ValueError:  # another thread has closed the socket
            raise ConnectionAbortedError("the connection is closed") from None
        except (OSError, AuthenticationError):
            self._drop()
            raise
        with self._lock:
            stream.write()
            for message in messages:
                self._handler.on_message(message)
        return True

    def start_thread(self) -> None:
        """Starts the thread that reads the connection and reconnects after a loss."""
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._serve, name="ringjax-coordinator-client", daemon=True
        )
        self._thread.start()

    def send(self, message: JsonObject) -> None:
        """Sends a message if there is a connection. Call `send` with the lock held."""
        stream = self._stream
        if stream is not None:
            stream.send(message)
            if stream.output and self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _serve(self) -> None:
        handler = self._handler
        while not self._closing:
            with self._lock:
                if handler.is_finished():
                    break
            stream = self._stream or self._reconnect()
            if stream is None:
                continue
            try:
                _wait(stream, None, self._wakeup)
                messages = stream.read()
            except (OSError, AuthenticationError):
                self._drop()
                continue
            with self._lock:
                stream.write()
                try:
                    for message in messages:
                        handler.on_message(message)
                except Exception as error:  # this thread has no caller to report to
                    why = f"{type(error).__name__}: {error}"
                    handler.give_up(f"what the coordinator said failed here: {why}")
                    break
        self._drop()

    def _reconnect(self) -> _Stream | None:
        """Connects again. Returns None after the time limit, or after `close`."""
        limit = self._reconnect_timeout
        deadline, pause = time.monotonic() + limit, 0.02
        while not self._closing:
            # Keep trying even if another program uses the port now, or the
            # loopback interface is down: the coordinator may be restarted later.
            with contextlib.suppress(OSError, StartupError):
                self.open(deadline)
                return self._stream
            if time.monotonic() + pause >= deadline:
                with self._lock:
                    self._handler.give_up(f"the coordinator was gone for {limit:g} s")
                return None
            wait_readable(self._wakeup, pause)
            pause = min(2 * pause, MAX_PAUSE)
        return None

    def _drop(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
            self._handler.on_disconnected()
        if stream is not None:
            stream.sock.close()

    def drain(self, seconds: float) -> None:
        """Waits up to `seconds` until all queued bytes are written. Takes the lock."""
        deadline = time.monotonic() + seconds
        while (stream := self._stream) is not None and stream.output:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)  # the socket may accept more bytes after a moment
            with self._lock:
                stream.write()

    def close(self) -> None:
        """Ends the thread and closes the connection. Further calls do nothing."""
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            os.eventfd_write(self._wakeup, 1)
            self._thread.join(HANDSHAKE_TIMEOUT)
        # `send` writes to the eventfd with the lock held, so close it with the lock.
        with self._lock:
            self.close_in_child()

    def close_in_child(self) -> None:
        """Closes all sockets in a forked child, which has no thread to end."""
        self._closing = True
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.sock.close()
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1


def _wait(stream: _Stream, seconds: float | None, wakeup: int = -1) -> bool:
    """Waits for input, for room for output, or for a wakeup. False after a timeout."""
    poll = select.poll()
    poll.register(stream.sock, select.POLLIN | (select.POLLOUT * bool(stream.output)))
    if wakeup >= 0:
        poll.register(wakeup, select.POLLIN)
    found = poll.poll(None if seconds is None else 1000 * seconds)
    if (wakeup, select.POLLIN) in found:
        os.eventfd_read(wakeup)
    return bool(found)
