"""Holds the sockets of a pair of ranks while factory.py connects it."""

from __future__ import annotations

import socket

from ringjax.links.control_connection import ControlConnection


class PairSetup:
    """The sockets of a pair of ranks that are being connected.

    Args:
        rank: the world rank of the peer.
        local: whether both ranks are on one host.

    Attributes:
        wants_control: whether the pair has a control connection, for heartbeats or to
            send the memory of the host.
        wants_data: whether the pair exchanges data over TCP or a fabric.
        watched: whether the ranks watch each other by heartbeats.
        kept: a control connection of an earlier epoch, until the peer has announced
            the current epoch on it. It then becomes `control`.
        keys: the encryption key of each socket; empty if the socket is not encrypted.
    """

    def __init__(self, rank: int, *, local: bool) -> None:
        self.rank, self.local = rank, local
        self.wants_control = self.wants_data = self.watched = False
        self.control: ControlConnection | None = None
        self.kept: ControlConnection | None = None
        self.data: list[socket.socket] = []
        self.keys: dict[socket.socket, bytes] = {}

    @property
    def lacks_control(self) -> bool:
        """Whether the pair has to make a control connection."""
        return self.wants_control and self.control is None and self.kept is None

    def lacks_data(self, streams: int) -> bool:
        """Returns whether the pair has to make connections for data."""
        return self.wants_data and len(self.data) < streams

    def release_kept(self) -> list[ControlConnection]:
        """Gives up the open connection of an earlier epoch, and returns it, if any."""
        found = [c for c in (self.control, self.kept) if c and c.kept and c.is_open]
        if found:
            self.control = self.kept = None
        return found

    def close(self) -> None:
        """Closes the sockets that this object still owns."""
        for each in (self.control, self.kept, *self.data):
            if each is not None:
                each.close()
