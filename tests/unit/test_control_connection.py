"""Tests of the messages on a control connection while no heartbeat reads it."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
from support.waiting import until

from ringjax import _native
from ringjax.errors import AuthenticationError
from ringjax.links import shared_memory
from ringjax.links.control_connection import ControlConnection, MessageType
from ringjax.links.kept_connections import KeptConnections

SECRET, JOB = b"s" * 32, "0123456789abcdef"


class Ends:
    """A connection of worker 3 with worker 8, and the sockets below."""

    def __init__(self) -> None:
        self.low_sock, self.high_sock = socket.socketpair()
        self.low = ControlConnection(self.low_sock, SECRET, JOB, 3, 8)
        self.high = ControlConnection(self.high_sock, SECRET, JOB, 8, 3)

    def bytes_of(self, send: Callable[[ControlConnection], None]) -> bytes:
        """Returns the bytes that worker 3 sends in a call."""
        send(self.low)
        return self.high_sock.recv(1 << 14, socket.MSG_DONTWAIT)

    def close(self) -> None:
        self.low.close()
        self.high.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.close()


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_announcement_in_pieces(ends: Ends) -> None:
    message = ends.bytes_of(lambda low: low.announce(7))
    for position in range(len(message)):
        assert ends.high.read_epoch(7) == -1
        ends.low_sock.send(message[position : position + 1])
    assert ends.high.read_epoch(7) == 7


def test_an_epoch_is_announced_once_and_epochs_may_be_left_out(ends: Ends) -> None:
    once = ends.bytes_of(lambda low: low.announce(4))
    ends.low.announce(4)
    ends.low_sock.send(once)
    ends.low.announce(9)
    assert ends.high.read_epoch(3) == 4
    assert ends.high.read_epoch(8) == 9
    ends.low_sock.send(b"of epoch 9")
    assert ends.high.read_epoch(8) == ends.high.read_epoch(9) == 9
    assert ends.high_sock.recv(20) == b"of epoch 9"


def test_messages_of_earlier_epochs_are_ignored(ends: Ends) -> None:
    fd = os.open(os.devnull, os.O_RDONLY)
    ends.low.announce(3)
    shared_memory.send_memory(ends.low, 5, [fd])
    ends.low.send(MessageType.LEAVE, b"x" * 1024)
    ends.low.announce(6)
    shared_memory.send_memory(ends.low, 6, [fd])
    before = count_descriptors()
    assert ends.high.read_epoch(6) == 6
    assert count_descriptors() == before
    received = shared_memory.receive_memory(ends.high, 1.0)
    assert received is not None and received[0] == 6
    assert os.path.sameopenfile(received[1], fd)
    os.close(received[1])
    os.close(fd)


def test_an_announcement_instead_of_memory(ends: Ends) -> None:
    ends.low.announce(6)
    assert shared_memory.receive_memory(ends.high, 1.0) is None
    assert ends.high.peer_epoch == 6


def test_another_message_instead_of_memory(ends: Ends) -> None:
    ends.low.send(MessageType.LEAVE, b"", [0])
    before = count_descriptors()
    with pytest.raises(OSError, match="it sent no memory"):
        shared_memory.receive_memory(ends.high, 1.0)
    assert count_descriptors() == before


def test_only_the_peer_can_announce_an_epoch(ends: Ends) -> None:
    other = ControlConnection(ends.low_sock, b"t" * 32, JOB, 3, 8)
    strange_job = ControlConnection(ends.low_sock, SECRET, "f" * 16, 3, 8)
    third = ControlConnection(ends.low_sock, SECRET, JOB, 4, 8)
    reflected = ControlConnection(ends.low_sock, SECRET, JOB, 8, 3)
    for impostor in (other, strange_job, third, reflected):
        impostor.announce(7)
        with pytest.raises(AuthenticationError):
            ends.high.read_epoch(7)
    assert ends.high.peer_epoch == -1
    message = bytearray(ends.bytes_of(lambda low: low.announce(7)))
    message[47] ^= 1  # the number of the epoch
    ends.low_sock.send(message)
    with pytest.raises(AuthenticationError):
        ends.high.read_epoch(7)


@pytest.mark.parametrize("damage", [(0, b"X"), (4, b"\0"), (4, b"\x7f"), (22, b"\xff")])
def test_garbage_ends_the_connection(ends: Ends, damage: tuple[int, bytes]) -> None:
    position, byte = damage
    message = bytearray(ends.bytes_of(lambda low: low.announce(7)))
    message[position : position + 1] = byte
    ends.low_sock.send(message)
    with pytest.raises(OSError, match="garbage"):
        ends.high.read_epoch(7)


def test_too_many_descriptors_end_the_connection(ends: Ends) -> None:
    before = count_descriptors()
    ends.low.send(MessageType.MEMORY, struct.pack("!Q", 1), [0, 1, 2, 1])
    with pytest.raises(OSError, match="descriptors"):
        shared_memory.receive_memory(ends.high, 1.0)
    ends.high.close()
    assert count_descriptors() == before - 1


def test_a_closed_connection_is_noticed_despite_copies(ends: Ends) -> None:
    ends.low.announce(2)
    with socket.socket(fileno=os.dup(ends.low_sock.fileno())):
        ends.low.close()
        assert ends.high.read_epoch(2) == 2
        with pytest.raises(ConnectionResetError):
            ends.high.read_epoch(3)
    with pytest.raises(OSError, match="pipe"):
        ends.high.announce(3)


def test_a_peer_that_reads_nothing_is_not_awaited(ends: Ends) -> None:
    with pytest.raises(OSError) as error:
        for _ in range(1 << 14):
            ends.low.send(MessageType.LEAVE, b"x" * 1000)
    assert error.value.errno == errno.EAGAIN


def test_a_child_closes_only_its_copies(ends: Ends) -> None:
    kept, copy = KeptConnections(), os.dup(ends.low_sock.fileno())
    kept.add(ends.low)
    kept.close_in_child()
    with socket.socket(fileno=copy) as sock:
        sock.send(b"x")
        assert ends.high_sock.recv(1) == b"x"


def test_the_end_of_the_job_tells_heartbeats(ends: Ends) -> None:
    kept = KeptConnections()
    kept.add(ends.low)
    kept.close()
    message = ends.high.receive(1.0)
    assert message is not None and message.type == MessageType.LEAVE
    with pytest.raises(ConnectionResetError):
        ends.high.receive(1.0)


def make_heartbeat(sock: socket.socket) -> _native.Heartbeat:
    """Makes the heartbeat of rank 0, which owns its connection to rank 1."""
    peers = [(1, sock.detach())]
    return _native.Heartbeat(0, ["a", "b"], peers, interval=0.05, timeout=60.0)


def test_a_heartbeat_understands_the_messages(ends: Ends) -> None:
    heartbeat = make_heartbeat(ends.high_sock)
    ends.low.send(MessageType.LEAVE, b"")
    until(lambda: heartbeat.left() == [1])
    assert heartbeat.release() == []
    heartbeat.close()


def test_a_heartbeat_passes_an_announcement_on(ends: Ends) -> None:
    heartbeat = make_heartbeat(ends.high_sock)
    ends.low.announce(12)
    ends.low.send(MessageType.LEAVE, b"of epoch 12")
    ((rank, fd, received, unsent),) = heartbeat.release()
    sock = socket.socket(fileno=fd)
    ends.high = ControlConnection(sock, SECRET, JOB, 8, 3, received, unsent)
    assert rank == 1
    assert ends.high.read_epoch(12) == 12
    message = ends.high.receive(1.0)
    assert message is not None
    assert message.text == b"of epoch 12"
    assert heartbeat.lost() == heartbeat.left() == []
    ends.high.announce(12)
    assert ends.low.read_epoch(12) == 12  # behind the beats of the heartbeat
    heartbeat.close()
