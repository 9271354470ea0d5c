"""Server for `ringjax top` in ringrun: sends each client one message per second.

The server runs in ringrun's loop and never waits for a client. A client that has not
received a whole message receives no further message, and after `_SEND_TIMEOUT` the
server closes the client's connection. If there are too many clients, the server closes
the oldest connection.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ringjax.control.unix_peer import peer_uid
from ringjax.monitor import sockets

_MAX_CLIENTS = 8
_SEND_TIMEOUT = 10.0  # seconds until a client must have received a message
_HELLO_TIMEOUT = 5.0  # seconds until a connection without a hello is closed
_CHUNK = 1 << 16


@dataclass(slots=True, eq=False)
class _TopClient:
    """A client of the server, which is a running `ringjax top`.

    Attributes:
        since: when the client connected, or when the server began to send `unsent`.
        received: the part of the hello that has arrived so far. is_subscribed: whether
        the hello has arrived, so that the client receives messages. unsent: the part of
        a message that the client has not received yet.
    """

    sock: socket.socket
    since: float
    received: bytes = b""
    is_subscribed: bool = False
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))


class TopServer:
    """Accepts clients of this user, and sends messages about the job to them.

    Args:
        on_change: called when a client subscribes, and when a subscriber disconnects.

    Raises OSError if the server's socket cannot be opened.
    """

    def __init__(
        self, selector: selectors.BaseSelector, on_change: Callable[[], None]
    ) -> None:
        self._selector, self._on_change = selector, on_change
        self._clients: list[_TopClient] = []
        self._listener, self.path = sockets.listen()
        self._owner = os.getpid()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def __len__(self) -> int:
        return sum(client.is_subscribed for client in self._clients)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if peer_uid(sock) != os.geteuid():
                sock.close()
                return
            while len(self._clients) >= _MAX_CLIENTS:
                self._close(self._clients[0])
            sock.setblocking(False)
            client = _TopClient(sock, time.monotonic())
            self._clients.append(client)
            self._watch(client, selectors.EVENT_READ)

    def _watch(self, client: _TopClient, events: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(client.sock)
        self._selector.register(client.sock, events, lambda: self._handle_event(client))

    def _handle_event(self, client: _TopClient) -> None:
        """Reads a hello or an end of file. Sends the rest of an unsent message."""
        try:
            data = client.sock.recv(_CHUNK)
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        wrong = data and not client.is_subscribed and not self._read_hello(client, data)
        if data == b"" or wrong:
            self._close(client)
        elif client.unsent:
            self._write(client)

    def _read_hello(self, client: _TopClient, data: bytes) -> bool:
        """Returns whether the input so far is a hello, or the beginning of a hello."""
        client.received += data
        if client.received == sockets.HELLO:
            client.is_subscribed = True
            self._on_change()
        return sockets.HELLO.startswith(client.received)

    def close_silent(self, now: float) -> None:
        """Closes connections that have sent no hello in time."""
        for client in list(self._clients):
            if not client.is_subscribed and now - client.since > _HELLO_TIMEOUT:
                self._close(client)

    def send(self, message: bytes) -> None:
        """Sends a message to all clients that have received the previous message."""
        now = time.monotonic()
        for client in [client for client in self._clients if client.is_subscribed]:
            if not client.unsent:
                client.unsent, client.since = memoryview(message), now
                self._write(client)
            elif now - client.since > _SEND_TIMEOUT:
                self._close(client)

    def _write(self, client: _TopClient) -> None:
        try:
            client.unsent = client.unsent[client.sock.send(client.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._close(client)
            return
        more = selectors.EVENT_WRITE if client.unsent else 0
        self._watch(client, selectors.EVENT_READ | more)

    def _close(self, client: _TopClient) -> None:
        self._clients.remove(client)
        with contextlib.suppress(KeyError):
            self._selector.unregister(client.sock)
        client.sock.close()
        if client.is_subscribed:
            self._on_change()

    def close(self) -> None:
        for client in list(self._clients):
            self._close(client)
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._listener)
        self._listener.close()
        # A fork of ringrun must not remove the socket of its parent.
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                Path(self.path).unlink()
