"""Connection of a worker to the coordinator, which may reconnect after a loss.

In an elastic job a thread reads the connection, and reconnects after the coordinator
was restarted. In other jobs there is no thread: a caller that waits for a message reads
the connection, and a lost connection stays lost. The handler (client.py) interprets the
messages.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from typing import Protocol

from ringjax.control.connecting import connect_to_server, enable_keepalive
from ringjax.control.handshake import HANDSHAKE_TIMEOUT, HandshakeRequest
from ringjax.control.member import JsonObject
from ringjax.control.polling import wait_readable
from ringjax.control.sealed_messages import SessionKeys
from ringjax.errors import AuthenticationError, StartupError

MAX_PAUSE = 0.25  # the most seconds between two attempts to connect


class ConnectionHandler(Protocol):
    """Receives the events of a connection. Called with its lock held."""

    def hello_message(self) -> JsonObject:
        """Returns the first message on a new connection."""

    def on_message(self, message: JsonObject) -> None:
        """Handles a message of the coordinator."""

    def on_disconnected(self) -> None:
        """Handles a loss. A thread then reconnects, unless `is_finished`."""

    def give_up(self, text: str) -> None:
        """Handles a loss after which nobody reconnects. The text has the reason."""

    def is_finished(self) -> bool:
        """Returns whether the worker has left the job and needs no connection."""


class _Stream:
    """An authenticated socket and its sealed messages."""

    def __init__(self, sock: socket.socket, keys: SessionKeys) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._sealer, self._opener = keys.sealer(), keys.opener()
        self.output = bytearray()

    def send(self, message: JsonObject) -> None:
        """Writes as much as the socket takes now. Only `read` reports errors."""
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
    """The connection to the coordinator, which a new connection may replace.

    Args:
        addresses: the addresses of the coordinator, "host:port,...", tried in turn.
        request: describes this worker in the handshake.
        failure_timeout: seconds of silence after which the kernel ends the connection;
            0 for no limit.
        reconnect_timeout: seconds in which the thread tries to reconnect after a loss;
            0 if there is no thread.
    """

    def __init__(
        self,
        addresses: str,
        secret: bytes,
        request: HandshakeRequest,
        failure_timeout: float = 0.0,
        reconnect_timeout: float = 0.0,
    ) -> None:
        self._addresses, self._secret, self._request = addresses, secret, request
        self._failure_timeout = failure_timeout
        self._reconnect_timeout = reconnect_timeout
        self._stream: _Stream | None = None
        self._handler: ConnectionHandler | None = None
        self._lock: threading.Condition | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._wakeup = -1

    @property
    def reconnects(self) -> bool:
        """Whether a thread reconnects after a loss."""
        return self._reconnect_timeout > 0

    def open(
        self, handler: ConnectionHandler, lock: threading.Condition, deadline: float
    ) -> str:
        """Connects and sends the hello. Tries each address once.

        Returns:
            The coordinator and its address, for errors.

        Raises:
            AuthenticationError: a server replies but does not have the secret.
            StartupError: the loopback interface of this host is down.
            OSError: no server replies.
        """
        sock, keys, where = connect_to_server(
            self._addresses, self._secret, self._request, deadline
        )
        if self._failure_timeout > 0:
            enable_keepalive(sock, self._failure_timeout)
        stream = _Stream(sock, keys)
        with lock:
            self._handler, self._lock, self._stream = handler, lock, stream
            self.send(handler.hello_message())
        return where

    def read(self, deadline: float) -> bool:
        """Waits for messages and passes them to the handler.

        For a connection without a thread, or before `start_thread`.

        Returns:
            False if no message has arrived by the deadline.

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
        """Starts the thread that reads from now on, and reconnects after a loss."""
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._serve, name="ringjax-coordinator-client", daemon=True
        )
        self._thread.start()

    def send(self, message: JsonObject) -> None:
        """Sends a message if there is a connection. Does not wait.

        Call it with the lock held.
        """
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
                except Exception as error:  # this thread has no caller to report to
                    why = f"{type(error).__name__}: {error}"
                    handler.give_up(f"what the coordinator said failed here: {why}")
                    break
        self._drop(handler, lock)

    def _reconnect(
        self, handler: ConnectionHandler, lock: threading.Condition
    ) -> _Stream | None:
        """Connects again; returns None after the time limit, or after `close`."""
        deadline, pause = time.monotonic() + self._reconnect_timeout, 0.02
        while not self._closing:
            # Keep trying even if another program uses the port now, or the
            # loopback interface is down: the coordinator may come back later.
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
        """Waits until everything is written, `seconds` at most.

        Call it without the lock.
        """
        deadline = time.monotonic() + seconds
        while (stream := self._stream) is not None and stream.output:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)  # the socket may accept more bytes after a moment
            with self._lock or contextlib.nullcontext():
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
        with self._lock or contextlib.nullcontext():
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
    """Returns whether a message, room for output or a wakeup comes within `seconds`."""
    poll = select.poll()
    poll.register(stream.sock, select.POLLIN | (select.POLLOUT * bool(stream.output)))
    if wakeup >= 0:
        poll.register(wakeup, select.POLLIN)
    found = poll.poll(None if seconds is None else 1000 * seconds)
    if (wakeup, select.POLLIN) in found:
        os.eventfd_read(wakeup)
    return bool(found)
