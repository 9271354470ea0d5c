"""Tests of more than 1,024 descriptors, and of errors that name the limit.

test_handshake.py and test_job_that_stops.py test hundreds of ranks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import socket
from collections.abc import Callable, Iterator

import pytest
from support.launch import ROOT
from support.link_ranks import JOB, SECRET, Ranks, world

from ringjax.control import open_files
from ringjax.control.polling import wait_readable, wait_writable
from ringjax.errors import OutOfDescriptors
from ringjax.links import shared_memory
from ringjax.links.control_connection import ControlConnection
from ringjax.membership.coordinator import Coordinator

__all__ = ["world"]  # a fixture


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Sets the soft limit of descriptors for one test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def set_to(soft: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))

    yield set_to
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_waiting_for_descriptors_beyond_1024(
    limit: Callable[[int], None],
) -> None:
    limit(2048)
    near = os.pipe()
    far = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1100) for fd in near]
    try:
        assert not wait_readable(far[0], 0.01)
        assert wait_writable(far[1])
        os.write(far[1], b"x")
        assert wait_readable(far[0])
    finally:
        for fd in (*near, *far):
            os.close(fd)


def test_no_module_calls_select() -> None:
    users = [
        str(path)
        for path in (ROOT / "ringjax").rglob("*.py")
        if re.search(r"\bselect\.select\(", path.read_text())
    ]
    assert users == []


def test_the_soft_limit_is_raised_as_far_as_needed(
    limit: Callable[[int], None],
) -> None:
    limit(256)
    assert open_files.raise_limit(300) == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 300 < soft <= min(hard, 4096)


def _forbid(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Patches the hard limit so that it allows only `most` more descriptors."""
    hard = len(os.listdir("/proc/self/fd")) + most
    monkeypatch.setattr(resource, "getrlimit", lambda which: (hard, hard))


def test_a_coordinator_with_a_low_limit_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _forbid(monkeypatch, 20)
    with pytest.raises(
        OutOfDescriptors, match="the coordinator: 40 descriptors .*NOFILE"
    ):
        Coordinator(bytes(32), "0" * 16, np=40)


def test_a_low_limit_is_named_by_the_rank(
    world: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = world((0, 0, 0))
    _forbid(monkeypatch, 4)
    with pytest.raises(
        OutOfDescriptors, match=r"world: rank 0: 6 descriptors .*RLIMIT_NOFILE.*ulimit"
    ):
        ranks.factories[0].build(0, range(3), "world")


def test_a_later_shortage_is_no_peer_loss(
    world: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = world((0, 0))

    def scarce(size: int, allocated: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(shared_memory, "create", scarce)
    futures = ranks.start(0, range(2), range(2), control=False)
    with pytest.raises(
        OutOfDescriptors,
        match="rank 0 could not be connected .*Too many open files.*NOFILE",
    ):
        futures[0].result()
    with contextlib.suppress(Exception):
        futures[1].result()


def test_sending_retries_if_too_many_descriptors_are_in_flight(
    world: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    send, refused = shared_memory.send_memory, []

    def crowded(connection: ControlConnection, size: int, fds: list[int]) -> None:
        if len(refused) < 5:
            refused.append(size)
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        send(connection, size, fds)

    monkeypatch.setattr(shared_memory, "send_memory", crowded)
    for links in world((0, 0, 0)).build():
        assert links.memory is not None
    assert len(refused) == 5


def test_descriptors_that_the_kernel_dropped_are_a_shortage(
    limit: Callable[[int], None],
) -> None:
    one, two = socket.socketpair()
    with one, two:
        shared_memory.send_memory(ControlConnection(one, SECRET, JOB, 0, 1), 1, [0])
        os.close(free := os.dup(0))
        limit(free)
        with pytest.raises(OSError, match="Too many open files"):
            shared_memory.receive_memory(ControlConnection(two, SECRET, JOB, 1, 0), 1.0)
