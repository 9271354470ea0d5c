"""Who is at the other end of a unix socket."""

from __future__ import annotations

import socket
import struct


def peer_uid(sock: socket.socket) -> int:
    """The user behind a connected unix socket, as the kernel tells it."""
    size = struct.calcsize("3i")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])
