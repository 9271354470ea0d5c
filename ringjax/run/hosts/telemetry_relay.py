"""Telemetry relay of an agent: forwards samples of this host's ranks to ringrun.

The relay listens on an abstract unix socket, whose name the agent puts into the
environment of its ranks. The relay closes connections of other users, because the
kernel reports the user id of each peer. A rank sends its samples and its time reports
as lines (ringjax.monitor). The relay forwards lines unchanged, and drops lines if
ringrun reads too slowly, so that neither a rank nor an agent ever waits.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from ringjax.control.unix_peer import peer_uid
from ringjax.monitor.time_report import is_time_report
from ringjax.run.hosts.channel import Message

_MAX_LINE = 1 << 18  # most bytes of a line
_CHUNK = 1 << 16
_MAX_UNIDENTIFIED = 64  # most connections that have not sent a hello yet
_HELLO_TIMEOUT = 5.0  # seconds until a connection without a hello is closed


@dataclass(slots=True, eq=False)
class _RankConnection:
    sock: socket.socket
    since: float
    number: int | None = None  # ringrun's number of the rank; None before the hello
    input: bytes = b""


class TelemetryRelay:
    """The relay of one agent. `ranks` contains the ids of the host's ranks.

    `forward` sends a message to ringrun, or drops it if too many are waiting.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        ranks: Container[int],
        forward: Callable[[Message], None],
    ) -> None:
        self._selector, self._ranks, self._forward = selector, ranks, forward
        self._listener: socket.socket | None = None
        self._connections: list[_RankConnection] = []
        self._interval = 0.0
        self.address = ""

    def start_listening(self) -> str:
        """Returns the name of the relay's socket. Opens the socket in the first call.

        Returns "" if the relay cannot listen. Then the job runs without telemetry from
        this host.
        """
        if self._listener is None:
            name = f"ringjax-agent-{secrets.token_hex(8)}"
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(f"\0{name}")
                listener.listen(_MAX_UNIDENTIFIED)
            except OSError:
                listener.close()
                return ""
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
            self._listener, self.address = listener, name
        return self.address

    def set_interval(self, seconds: float) -> None:
        """Makes all ranks send a sample every `seconds`; with 0 they send none."""
        self._interval = seconds
        for connection in [c for c in self._connections if c.number is not None]:
            self._send_interval(connection)

    def _send_interval(self, connection: _RankConnection) -> None:
        try:
            connection.sock.send(f"{self._interval:g}\n".encode())
        # The rank does not read, so it does not send samples either.
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if peer_uid(sock) != os.geteuid():
                sock.close()
                return
            sock.setblocking(False)
            if len(unidentified := self._unidentified()) >= _MAX_UNIDENTIFIED:
                self._close(unidentified[0])
            connection = _RankConnection(sock, time.monotonic())
            self._connections.append(connection)
            self._selector.register(
                sock, selectors.EVENT_READ, lambda: self._read(connection)
            )

    def _unidentified(self) -> list[_RankConnection]:
        return [c for c in self._connections if c.number is None]

    def timeout(self) -> float | None:
        """Returns the seconds until `close_silent` must be called; None for never."""
        since = [connection.since for connection in self._unidentified()]
        return (
            max(0.0, min(since) + _HELLO_TIMEOUT - time.monotonic()) if since else None
        )

    def close_silent(self) -> None:
        """Closes connections that have sent no hello in time."""
        for connection in self._unidentified():
            if time.monotonic() - connection.since >= _HELLO_TIMEOUT:
                self._close(connection)

    def _read(self, connection: _RankConnection) -> None:
        try:
            data = connection.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, connection.input = (connection.input + data).split(b"\n")
        if not data or len(connection.input) > _MAX_LINE:
            self._close(connection)
            return
        for line in lines:
            if connection.number is None:
                connection.number = self._parse_hello(line)
                if connection.number is None:
                    self._close(connection)
                    return
                if self._interval:
                    self._send_interval(connection)
            elif self._interval or is_time_report(line):
                text = line.decode(errors="replace")
                self._forward({"is": "sample", "id": connection.number, "text": text})

    def _parse_hello(self, line: bytes) -> int | None:
        """Returns the id of a rank of this host, or None if the hello is invalid.

        The check is strict, because any process of this user can connect.
        """
        number = line.removeprefix(b'{"id":').removesuffix(b"}")
        rank = int(number) if number.isdigit() and len(number) < 11 else -1
        return rank if rank >= 0 and rank in self._ranks else None

    def _close(self, connection: _RankConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.sock)
            connection.sock.close()
