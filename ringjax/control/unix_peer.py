"""Finds the user at the other end of a unix socket (SO_PEERCRED)."""

from __future__ import annotations

import socket
import struct


def peer_uid(sock: socket.socket) -> int:
    """Returns the user id of the process at the other end of a unix socket."""
    size = struct.calcsize("3i")
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", found)
    return int(uid)
