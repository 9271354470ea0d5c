"""Creates shared memory for ranks of one host, and sends its file descriptors.

The memory is a memfd, which has no name and exists as long as a process has it open. So
no file is left behind after a crash, and the size of /dev/shm does not matter. The
native core places its shared segment and its rings in the memfd (host_memory.h).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from ringjax import failpoints
from ringjax.control.handshake import HANDSHAKE_TIMEOUT
from ringjax.links.control_connection import ControlConnection, MessageType
from ringjax.links.memory import available as available

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_TEXT = struct.Struct("!Q")  # the size of the memory in bytes; 0 without memory


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


def send_memory(connection: ControlConnection, size: int, fds: list[int]) -> None:
    """Sends the size of the memory and its descriptor, if any, over a unix socket.

    Raises OSError.
    """
    text = _TEXT.pack(size)
    connection.send(MessageType.MEMORY, text, fds, wait=HANDSHAKE_TIMEOUT)


def receive_memory(
    connection: ControlConnection, seconds: float
) -> tuple[int, int] | None:
    """Receives the size of the memory and its descriptor, or -1 without a descriptor.

    Returns None after `seconds`, and if the peer is in a later epoch.

    Raises:
        OSError: the other end has closed the connection, or has sent something else.
    """
    message = connection.receive(seconds)
    if message is None or message.type == MessageType.EPOCH:
        return None
    if message.type != MessageType.MEMORY or len(message.text) != _TEXT.size:
        for fd in message.fds:
            os.close(fd)
        raise OSError(errno.EBADMSG, "it sent no memory")
    return _TEXT.unpack(message.text)[0], next(iter(message.fds), -1)
