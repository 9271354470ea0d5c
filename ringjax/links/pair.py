"""What exists between this rank and one other while their links are being made.

The order of things, and what goes wrong, is in mesh.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence

from ringjax.links import shared_memory


class PairSetup:
    """This rank and one other.

    Attributes:
        rank: the other one, in the world.
        local: both are on one host.
        shm: both want shared memory.
        shared: they will have it, until it turns out that there is none.
        keys: by socket, what the native core encrypts with; empty: nothing.
    """

    def __init__(self, rank: int, *, local: bool, shm: bool) -> None:
        self.rank, self.local, self.shm = rank, local, shm
        self.shared = local and shm
        self.control: socket.socket | None = None
        self.data: list[socket.socket] = []
        self.keys: dict[socket.socket, bytes] = {}
        self.memory = self.doorbell = -1
        self._early: list[tuple[int, list[int]]] = []
        # Whether it has said what every pair with shared memory says: one thing in each
        # direction. What follows that may be for somebody else: for the heartbeat.
        self._heard = False

    def receive(self, most: int, seconds: float) -> tuple[int, list[int]] | None:
        """As `shared_memory.receive`, from this one."""
        assert self.control is not None
        if not self._early:
            found = shared_memory.receive(self.control, most, seconds)
            self._heard |= found is not None
            return found
        size, fds = self._early.pop(0)
        if len(fds) > most:
            for fd in fds:
                os.close(fd)
            raise OSError(f"it sent {len(fds)} descriptors")
        return size, fds

    @property
    def silent(self) -> bool:
        """Whether it is connected and has still to say something."""
        return self.control is not None and self.shared and not self._heard

    def take_early(self) -> None:
        """Takes what has come; `receive` returns it later."""
        assert self.control is not None
        with contextlib.suppress(OSError):  # `receive` will find it again
            if (found := shared_memory.receive(self.control, 2, 0.001)) is not None:
                self._early.append(found)
                self._heard = True

    def close(self) -> None:
        """Closes what nobody has taken."""
        for sock in (self.control, *self.data):
            if sock is not None:
                sock.close()
        for fd in (
            self.memory,
            self.doorbell,
            *(f for _, fds in self._early for f in fds),
        ):
            if fd >= 0:
                os.close(fd)
        self._early.clear()


def take_early(pairs: Sequence[PairSetup]) -> None:
    """Takes descriptors that have come, so that they are on their way no longer.

    For a rank that cannot send because too many are: if all ranks waited with what they
    have sent unread by the others, all would wait for ever.
    """
    poll, waiting = select.poll(), {}
    for pair in pairs:
        if pair.silent:
            assert pair.control is not None
            waiting[pair.control.fileno()] = pair
            poll.register(pair.control, select.POLLIN)
    for fd, events in poll.poll(10):
        if events & select.POLLIN:
            waiting[fd].take_early()
    time.sleep(0.005)  # one that is at its end would make this a busy loop
