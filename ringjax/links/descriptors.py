"""The ends of a communicator's links on this rank, as descriptors for the native core.

They are made in mesh.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


@dataclass
class LinkDescriptors:
    """Descriptors for `_native.Communicator` and `_native.Heartbeat`, which take them.

    Attributes:
        links: ("shm", peer, memfd, side, ring_bytes, doorbell of the peer, number of
            the peer's process) or
            ("tcp", peer, [socket, ...]), encrypted with a list of keys as a fourth;
            peers count within the communicator.
        doorbell: this rank's own eventfd.
        segment: (memfd, bytes of a tile, doorbells by rank) if all ranks share a host.
        control: (world rank, socket) for each other rank, if asked for.
        control_keys: what these are encrypted with; empty: nothing.
    """

    links: list[tuple[Any, ...]] = field(default_factory=list)
    doorbell: int = -1
    segment: tuple[int, int, list[int]] | None = None
    control: list[tuple[int, int]] = field(default_factory=list)
    control_keys: list[bytes] = field(default_factory=list, repr=False)

    def descriptors(self) -> list[int]:
        """All descriptors in it."""
        found = [self.doorbell] if self.doorbell >= 0 else []
        for link in self.links:
            found += [link[2], link[5]] if link[0] == "shm" else link[2]
        if self.segment is not None:
            found += [self.segment[0], *(fd for fd in self.segment[2] if fd >= 0)]
        return found + [fd for _, fd in self.control]

    def sockets(self) -> list[tuple[int, int]]:
        """The connections among them: (descriptor, inode)."""
        fds = [fd for _, fd in self.control]
        fds += [fd for link in self.links if link[0] == "tcp" for fd in link[2]]
        return [(fd, os.fstat(fd).st_ino) for fd in fds]

    def close(self) -> None:
        """Closes everything; only before somebody else has taken it."""
        for fd in self.descriptors():
            os.close(fd)
        self.links, self.doorbell, self.segment, self.control = [], -1, None, []
