"""Holds the sockets of a pair of ranks while factory.py connects it."""

from __future__ import annotations

import socket


class PairSetup:
    """The sockets of a pair of ranks that are being connected.

    Args:
        rank: the world rank of the peer.
        local: whether both ranks are on one host.

    Attributes:
        wants_control: whether the pair has a control connection, for heartbeats or to
            send the memory of the host.
        wants_data: whether the pair exchanges data over TCP.
        watched: whether the ranks watch each other by heartbeats.
        keys: the encryption key of each socket; empty if the socket is not encrypted.
    """

    def __init__(self, rank: int, *, local: bool) -> None:
        self.rank, self.local = rank, local
        self.wants_control = self.wants_data = self.watched = False
        self.control: socket.socket | None = None
        self.data: list[socket.socket] = []
        self.keys: dict[socket.socket, bytes] = {}

    def close(self) -> None:
        """Closes the sockets that this object still owns."""
        for sock in (self.control, *self.data):
            if sock is not None:
                sock.close()
