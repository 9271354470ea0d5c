"""Holds the sockets and the memory of a pair of ranks while mesh.py connects it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence

from ringjax.links import shared_memory


class PairSetup:
    """The sockets and the memory of a pair of ranks that are being connected.

    Args:
        rank: the world rank of the peer.
        local: whether both ranks are on one host.
        shm: whether both ranks want shared memory.
        watched: whether the ranks watch each other by heartbeats.

    Attributes:
        needs_control: whether the pair has a control connection, for heartbeats or to
            send descriptors of shared memory.
        shared: whether the pair uses shared memory. Becomes false if none is available.
        keys: the encryption key of each socket; empty if the socket is not encrypted.
    """

    def __init__(self, rank: int, *, local: bool, shm: bool, watched: bool) -> None:
        self.rank, self.local, self.shm, self.watched = rank, local, shm, watched
        self.shared = local and shm
        self.needs_control = self.shared or watched
        self.control: socket.socket | None = None
        self.data: list[socket.socket] = []
        self.keys: dict[socket.socket, bytes] = {}
        self.memory = self.doorbell = -1
        self._early: list[tuple[int, list[int]]] = []
        # With shared memory, each rank of the pair sends one message. Later bytes on
        # the connection may be for the heartbeat, so do not read them here.
        self._has_received = False

    def receive(self, most: int, seconds: float) -> tuple[int, list[int]] | None:
        """Receives a size and up to `most` descriptors, or None after `seconds`."""
        assert self.control is not None
        if not self._early:
            found = shared_memory.receive_descriptors(self.control, most, seconds)
            self._has_received |= found is not None
            return found
        size, fds = self._early.pop(0)
        if len(fds) > most:
            for fd in fds:
                os.close(fd)
            raise OSError(f"it sent {len(fds)} descriptors")
        return size, fds

    @property
    def awaits_message(self) -> bool:
        """Whether the peer is connected and has not sent its descriptors yet."""
        return self.control is not None and self.shared and not self._has_received

    def receive_early(self) -> None:
        """Receives a message now, and stores it until a later call of `receive`."""
        assert self.control is not None
        with contextlib.suppress(OSError):  # `receive` raises the error later
            found = shared_memory.receive_descriptors(self.control, 2, 0.001)
            if found is not None:
                self._early.append(found)
                self._has_received = True

    def close(self) -> None:
        """Closes the sockets and descriptors that this object still owns."""
        for sock in (self.control, *self.data):
            if sock is not None:
                sock.close()
        early = [fd for _, fds in self._early for fd in fds]
        for fd in (self.memory, self.doorbell, *early):
            if fd >= 0:
                os.close(fd)
        self._early.clear()


def receive_early(pairs: Sequence[PairSetup]) -> None:
    """Receives the descriptors that have arrived, so that they are no longer in flight.

    The kernel limits how many descriptors of a user are in flight on unix sockets. A
    rank that cannot send because of this limit calls this function. If all ranks waited
    without receiving, no rank could ever send.
    """
    poll, waiting = select.poll(), {}
    for pair in pairs:
        if pair.awaits_message:
            assert pair.control is not None
            waiting[pair.control.fileno()] = pair
            poll.register(pair.control, select.POLLIN)
    for fd, events in poll.poll(10):
        if events & select.POLLIN:
            waiting[fd].receive_early()
    # A closed connection makes `poll` return immediately. Without a pause, the loop of
    # the caller would then use a whole core.
    time.sleep(0.005)
