"""Creates shared memory for ranks of one host, and sends its file descriptors.

The memory is a memfd, which has no name and exists as long as a process has it open. So
no file is left behind after a crash, and the size of /dev/shm does not matter. The
native core places its shared segment and its rings in the memfd (host_memory.h).
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
_MESSAGE = struct.Struct("!Q")  # the size of the memory in bytes; 0 without memory


def create(size: int, allocated: int) -> int:
    """Creates a memfd of fixed size, of which the first bytes are allocated already.

    Raises OSError if `allocated` exceeds half of the available memory, or if the kernel
    does not support memfd.
    """
    failpoints.passing("memory.make")
    # Check the size first: if the host has too little memory, allocating a memfd does
    # not fail, but the kernel kills processes.
    if allocated > available() // 2:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    fd = os.memfd_create("ringjax", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # Allocate the pages now, because a lack of memory later would cause SIGBUS.
        os.posix_fallocate(fd, 0, allocated)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_valid(fd: int, size: int) -> bool:
    """Returns whether a descriptor is a memfd of this size that no process can shrink.

    An access beyond the end of a memfd that was shrunk kills the process (SIGBUS).
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd
        return False
    return os.fstat(fd).st_size == size and seals & _SEALS == _SEALS


def send_descriptors(sock: socket.socket, size: int, fds: list[int]) -> None:
    """Sends descriptors and the size of the memory over a unix socket."""
    sock.settimeout(HANDSHAKE_TIMEOUT)
    socket.send_fds(sock, [_MESSAGE.pack(size)], fds)


def receive_descriptors(
    sock: socket.socket, most: int, seconds: float
) -> tuple[int, list[int]] | None:
    """Receives the size and at most `most` descriptors. Returns None after `seconds`.

    Raises:
        OSError: the other end has closed the connection, or has sent more descriptors.
    """
    message, fds = b"", array.array("i")
    room = socket.CMSG_LEN(most * fds.itemsize)
    try:
        sock.settimeout(seconds)
        while len(message) < _MESSAGE.size:
            try:
                # socket.recv_fds ignores its flags, so it cannot set MSG_CMSG_CLOEXEC.
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
            # The kernel drops received descriptors if this process has too many open
            # files. Then `dup` fails with EMFILE, which explains the loss.
            if flags & socket.MSG_CTRUNC:
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
