"""ControlConnection: a control connection of two ranks while no heartbeat uses it.

The messages have the structure that heartbeats read and write
(xla_ext/engine/heartbeat/control_message.h). A rank announces each epoch by a message
of type EPOCH. All earlier messages on the connection belong to earlier epochs, and the
receiver ignores them. The HMAC in the announcement proves that the sender knows the
secret of the job, as the handshake did (control/handshake.py).
"""

from __future__ import annotations

import array
import contextlib
import enum
import errno
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ringjax.errors import AuthenticationError

_MAGIC = 0x43484752
_HEAD = struct.Struct("=IB3xiiiI16x")  # magic, type, from, to, culprit, length
_MAX_TEXT = 1024
_ROOM = socket.CMSG_LEN(array.array("i", [0]).itemsize)
_EPOCH = struct.Struct("!Q32s")  # the number of the epoch, HMAC
_PROVEN = struct.Struct("!13s8sQqq")  # label, job, epoch, sender, receiver


class MessageType(enum.IntEnum):
    """The types that Python sends. Types below EPOCH are those of heartbeats."""

    LEAVE = 3
    EPOCH = 10
    MEMORY = 11  # see shared_memory.py; never sent while a heartbeat reads


class ControlMessage(NamedTuple):
    """A received message. The receiver must close the descriptors `fds`."""

    type: int
    text: bytes
    fds: list[int]


class ControlConnection:
    """Reads and writes the messages of one control connection.

    Args:
        worker: the id of this worker.
        peer: the id of the worker at the other end.
        received: bytes of an incomplete message that a heartbeat has received.
        unsent: the rest of a message that a heartbeat has sent in part.

    Attributes:
        peer_epoch: the newest epoch that the peer has announced, or -1. Bytes behind
            this announcement belong to that epoch.
        kept: whether the connection is older than the current epoch.
    """

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        job: str,
        worker: int,
        peer: int,
        received: bytes = b"",
        unsent: bytes = b"",
    ) -> None:
        self.sock, self.worker, self.peer = sock, worker, peer
        self.peer_epoch = -1
        self.kept = False
        self._secret, self._job = secret, bytes.fromhex(job)
        self._announced = -1  # the newest epoch that this rank has announced
        self._received, self._unsent = received, unsent
        self._fds = array.array("i")

    @property
    def is_open(self) -> bool:
        return self.sock.fileno() >= 0

    def announce(self, epoch: int) -> None:
        """Tells the peer that this rank connects the members of `epoch`.

        Raises OSError, also if the peer reads nothing at the moment.
        """
        if self._announced < epoch:
            self._announced = epoch
            mac = self._mac(epoch, self.worker, self.peer)
            self.send(MessageType.EPOCH, _EPOCH.pack(epoch, mac))

    def read_epoch(self, epoch: int) -> int:
        """Reads until the peer has announced `epoch` or a later epoch.

        Returns `peer_epoch` without waiting. Does not read beyond that announcement.

        Raises:
            OSError: the connection has ended.
            AuthenticationError: the peer does not know the secret.
        """
        while self.peer_epoch < epoch and (message := self.receive(0.0)) is not None:
            for fd in message.fds:
                os.close(fd)
        return self.peer_epoch

    def send(
        self, kind: MessageType, text: bytes, fds: Sequence[int] = (), wait: float = 0.0
    ) -> None:
        """Sends a message within `wait` seconds. Raises OSError."""
        head = _HEAD.pack(_MAGIC, kind, 0, -1, -1, len(text))
        message = self._unsent + head + text
        rights = array.array("i", fds)
        items = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
        self.sock.settimeout(wait)
        sent = self.sock.sendmsg([message], items, socket.MSG_NOSIGNAL)
        self._unsent = message[sent:]
        if self._unsent:
            raise BlockingIOError(errno.EAGAIN, "it does not read")

    def receive(self, wait: float) -> ControlMessage | None:
        """Returns the next message, or None after `wait` seconds without bytes.

        Raises as `read_epoch` does.
        """
        self.sock.settimeout(wait)
        while missing := self._missing():
            try:
                self._receive_piece(missing)
            except (TimeoutError, BlockingIOError):
                return None
        kind = _HEAD.unpack_from(self._received)[1]
        text, fds = self._received[_HEAD.size :], self._fds.tolist()
        self._received, self._fds = b"", array.array("i")
        if kind == MessageType.EPOCH:
            self.peer_epoch = max(self.peer_epoch, self._verified(text))
        return ControlMessage(kind, text, fds)

    def _missing(self) -> int:
        """Returns how many bytes the next message, or its head, still lacks."""
        if len(self._received) < _HEAD.size:
            return _HEAD.size - len(self._received)
        magic, kind, _, _, _, length = _HEAD.unpack_from(self._received)
        valid = magic == _MAGIC and 0 < kind <= MessageType.MEMORY
        if not valid or length > _MAX_TEXT:
            raise OSError(errno.EBADMSG, "it sent garbage on its control connection")
        return _HEAD.size + int(length) - len(self._received)

    def _receive_piece(self, most: int) -> None:
        # socket.recv_fds ignores its flags, so it cannot set MSG_CMSG_CLOEXEC.
        piece, items, flags, _ = self.sock.recvmsg(most, _ROOM, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in items:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) - len(data) % self._fds.itemsize
                self._fds.frombytes(data[:whole])
        if not piece:
            raise ConnectionResetError("it closed the connection")
        # The kernel drops received descriptors if this process has too many open files.
        # Then `dup` fails with EMFILE, which explains the loss.
        if flags & socket.MSG_CTRUNC:
            os.close(os.dup(self.sock.fileno()))
            raise OSError(errno.EBADMSG, "it sent too many descriptors")
        self._received += piece

    def _mac(self, epoch: int, sender: int, receiver: int) -> bytes:
        proven = _PROVEN.pack(b"ringjax epoch", self._job, epoch, sender, receiver)
        return hmac.digest(self._secret, proven, "sha256")

    def _verified(self, text: bytes) -> int:
        """Returns the epoch in the text of an announcement."""
        if len(text) == _EPOCH.size:
            epoch, mac = _EPOCH.unpack(text)
            if hmac.compare_digest(mac, self._mac(epoch, self.peer, self.worker)):
                return int(epoch)
        raise AuthenticationError("does not know this job's secret")

    def detach(self) -> int:
        """Returns the descriptor of the socket, which the caller then owns."""
        return self.sock.detach()

    def close(self) -> None:
        """Ends the connection, also for copies of the socket in forked children."""
        if self.is_open:
            with contextlib.suppress(OSError):  # the peer has reset the connection
                self.sock.shutdown(socket.SHUT_RDWR)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Closes only the descriptors of this process, and not the connection."""
        for fd in self._fds:
            os.close(fd)
        self._fds = array.array("i")
        with contextlib.suppress(OSError):
            self.sock.close()
