"""Memory shared by two ranks of a host, and how its descriptors travel between them.

A memfd has no name and lives as long as somebody holds it, so nothing is left behind
after any death, and the size of /dev/shm does not matter. Not the rings inside: those
are the native core's.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct

from ringjax import failpoints
from ringjax.control.handshake import HANDSHAKE_TIMEOUT
from ringjax.links.memory import available as available

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MESSAGE = struct.Struct("!Q")  # the size of the memory, 0: there is none


def make(size: int, left: int | None = None) -> int:
    """A sealed memfd whose pages exist.

    Args:
        left: what `available` has said, by who makes many.

    Raises:
        OSError: the system has no memory for it, or no memfd.
    """
    failpoints.passing("memory.make")
    # A memfd has no limit of its own: asking for too much would not fail but make the
    # kernel kill processes.
    if size > (available() if left is None else left) // 2:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    fd = os.memfd_create("ringjax", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # Without this a lack of memory would show as SIGBUS on first touch.
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
    sock.settimeout(HANDSHAKE_TIMEOUT)
    socket.send_fds(sock, [_MESSAGE.pack(size)], fds)


def receive(
    sock: socket.socket, most: int, seconds: float
) -> tuple[int, list[int]] | None:
    """What `send` sent: the size and at most `most` descriptors; None if nothing yet.

    Raises:
        OSError: the other end is gone.
    """
    message, fds = b"", array.array("i")
    room = socket.CMSG_LEN(most * fds.itemsize)
    try:
        sock.settimeout(seconds)
        while len(message) < _MESSAGE.size:
            try:
                # Not socket.recv_fds: it takes flags but does not use them.
                piece, items, flags, _ = sock.recvmsg(
                    _MESSAGE.size - len(message), room, socket.MSG_CMSG_CLOEXEC
                )
            except TimeoutError:
                if not message:
                    return None
                raise
            for level, kind, data in items:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            if not piece:
                raise ConnectionResetError("it closed the connection")
            if flags & socket.MSG_CTRUNC:  # mostly because this process has too many
                os.close(os.dup(sock.fileno()))
            message += piece
            sock.settimeout(HANDSHAKE_TIMEOUT)
        if len(fds) > most:
            raise OSError(f"it sent {len(fds)} descriptors")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return _MESSAGE.unpack(message)[0], fds.tolist()
