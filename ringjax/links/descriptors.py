"""File descriptors of a communicator's links on this rank, for the native core."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


@dataclass
class LinkDescriptors:
    """Descriptors from mesh.py for `_native.Communicator` and `_native.Heartbeat`.

    The native objects close the descriptors. A peer is a rank within the communicator.

    Attributes:
        links: ("shm", peer, memfd, side, ring_bytes, doorbell of the peer, process id
            of the peer) or ("tcp", peer, [socket, ...]). An encrypted TCP link has a
            list of keys as fourth element.
        doorbell: the eventfd by which peers wake this rank.
        segment: (memfd, bytes of a tile, doorbells by rank) of the memory that all
            ranks share; None if they share none.
        control: (world rank, socket) for each peer, if the caller of `build` wants
            control connections.
        control_keys: the keys of the control sockets; empty without encryption.
    """

    links: list[tuple[Any, ...]] = field(default_factory=list, repr=False)
    doorbell: int = -1
    segment: tuple[int, int, list[int]] | None = None
    control: list[tuple[int, int]] = field(default_factory=list)
    control_keys: list[bytes] = field(default_factory=list, repr=False)

    def descriptors(self) -> list[int]:
        found = [self.doorbell] if self.doorbell >= 0 else []
        for link in self.links:
            found += [link[2], link[5]] if link[0] == "shm" else link[2]
        if self.segment is not None:
            found += [self.segment[0], *(fd for fd in self.segment[2] if fd >= 0)]
        return found + [fd for _, fd in self.control]

    def sockets(self) -> list[tuple[int, int]]:
        """Returns the descriptor and the inode of each socket."""
        fds = [fd for _, fd in self.control]
        fds += [fd for link in self.links if link[0] == "tcp" for fd in link[2]]
        return [(fd, os.fstat(fd).st_ino) for fd in fds]

    def close(self) -> None:
        """Closes all descriptors. Call `close` only if no native object owns them."""
        for fd in self.descriptors():
            os.close(fd)
        self.links, self.doorbell, self.segment, self.control = [], -1, None, []
