"""Memory shared by two ranks of a host, and how its descriptors travel between them.

A memfd has no name and lives as long as somebody holds it, so nothing is left behind
after any death, and the size of /dev/shm does not matter. Not the rings inside: those
are the native core's.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from .handshake import LIMIT

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MESSAGE = struct.Struct("!Q")  # the size of the memory, 0: there is none


def make(size: int) -> int:
    """A sealed memfd whose pages exist.

    Raises:
        OSError: the system has no memory for it, or no memfd.
    """
    fd = os.memfd_create("ringjax", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # Without this a full machine would show as SIGBUS on first touch.
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sound(fd: int, size: int) -> bool:
    """Whether a descriptor is memory of that size which nobody can shrink under us."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd
        return False
    return os.fstat(fd).st_size == size and seals & _SEALS == _SEALS


def send(sock: socket.socket, size: int, fds: list[int]) -> None:
    """Sends descriptors over a unix socket, with the size of the memory."""
    sock.settimeout(LIMIT)
    socket.send_fds(sock, [_MESSAGE.pack(size)], fds)


def receive(
    sock: socket.socket, most: int, seconds: float
) -> tuple[int, list[int]] | None:
    """What `send` sent: the size and at most `most` descriptors; None if nothing yet.

    Raises:
        OSError: the other end is gone.
    """
    message, fds = b"", list[int]()
    try:
        sock.settimeout(seconds)
        while len(message) < _MESSAGE.size:
            try:
                piece, more, _, _ = socket.recv_fds(
                    sock, _MESSAGE.size - len(message), most, socket.MSG_CMSG_CLOEXEC
                )
            except TimeoutError:
                if not message:
                    return None
                raise
            fds += more
            if not piece:
                raise ConnectionResetError("it closed the connection")
            message += piece
            sock.settimeout(LIMIT)
        if len(fds) > most:
            raise OSError(f"it sent {len(fds)} descriptors")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return _MESSAGE.unpack(message)[0], fds
