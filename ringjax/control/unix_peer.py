"""Finds the process and the user at the other end of a unix socket (SO_PEERCRED)."""

from __future__ import annotations

import socket
import struct


def peer_uid(sock: socket.socket) -> int:
    """Returns the user id of the process at the other end of a unix socket."""
    return _credentials(sock)[1]


def peer_pid(sock: socket.socket) -> int:
    """Returns the peer's process id, or 0 if its PID namespace is not visible here."""
    return _credentials(sock)[0]


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    size = struct.calcsize("3i")
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, gid = struct.unpack("3i", found)
    return pid, uid, gid
