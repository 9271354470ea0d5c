"""KeptConnections: the control connections that a rank keeps between two epochs.

A handshake takes more CPU time than the rest of a connection. So surviving ranks keep
their control connections: the heartbeat of the epoch that is over releases them
(_native.Heartbeat.release), each rank announces the next epoch on them, and LinkFactory
uses those on which the peer announces the same epoch. Encrypted connections are not
kept, because their state is in the native core. Nor are sockets for data, among them
those of RINGJAX_FABRIC, so no message of an earlier epoch can arrive in a later one.

If one rank of a pair closes its connection, the other rank sees the end, and both
connect anew. So the two ranks of a pair never wait for different connections.
"""

from __future__ import annotations

import contextlib

from ringjax.links.control_connection import ControlConnection, MessageType


class KeptConnections:
    """Owns the kept connections, by the id of the worker at the other end."""

    def __init__(self) -> None:
        self._by_worker: dict[int, ControlConnection] = {}

    def add(self, connection: ControlConnection) -> None:
        """Takes ownership of an open connection."""
        connection.kept = True
        if (old := self.take(connection.peer)) is not None:
            old.close()
        self._by_worker[connection.peer] = connection

    def announce(self, epoch: int) -> None:
        """Announces an epoch on all connections, and closes those that fail."""
        for worker, connection in list(self._by_worker.items()):
            try:
                connection.announce(epoch)
            except OSError:
                self._by_worker.pop(worker).close()

    def take(self, worker: int) -> ControlConnection | None:
        """Returns the connection to a worker, if there is one. The caller owns it."""
        return self._by_worker.pop(worker, None)

    def close(self) -> None:
        """Closes all connections. Heartbeats that still use them are told before."""
        for connection in self._by_worker.values():
            with contextlib.suppress(OSError):
                connection.send(MessageType.LEAVE, b"")
            connection.close()
        self._by_worker.clear()

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the sockets, and not the connections."""
        for connection in self._by_worker.values():
            connection.close_in_child()
        self._by_worker.clear()
