"""File descriptors of a communicator's links on this rank, for the native core."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


@dataclass
class LinkDescriptors:
    """Descriptors from factory.py for `_native.Communicator` and `_native.Heartbeat`.

    The native objects close the descriptors. A peer is a rank within the communicator.

    Attributes:
        name: the name of the doorbells of this host (xla_ext/transport/doorbell.h).
        links: (peer, sockets, keys) for each link over TCP, or over a fabric, which has
            one socket; without encryption, `keys` is empty.
        memory: (memfd, bytes of a ring, bytes of a tile or 0, ranks in the order of
            their indices) of the memory that ranks of this host share; or None.
        control: (world rank, socket) for each peer, if the caller of `build` wants
            control connections.
        control_keys: the keys of the control sockets; empty without encryption.
    """

    name: str = field(default="", repr=False)
    links: list[tuple[int, list[int], list[bytes]]] = field(
        default_factory=list, repr=False
    )
    memory: tuple[int, int, int, list[int]] | None = None
    control: list[tuple[int, int]] = field(default_factory=list)
    control_keys: list[bytes] = field(default_factory=list, repr=False)

    def descriptors(self) -> list[int]:
        found = [fd for link in self.links for fd in link[1]]
        if self.memory is not None:
            found.append(self.memory[0])
        return found + [fd for _, fd in self.control]

    def sockets(self) -> list[tuple[int, int]]:
        """Returns the descriptor and the inode of each socket."""
        fds = [fd for _, fd in self.control]
        fds += [fd for link in self.links for fd in link[1]]
        return [(fd, os.fstat(fd).st_ino) for fd in fds]

    def close(self) -> None:
        """Closes all descriptors. Call `close` only if no native object owns them."""
        for fd in self.descriptors():
            os.close(fd)
        self.links, self.memory, self.control = [], None, []
