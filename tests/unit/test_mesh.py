"""Tests of building links: the kind of each pair's link, its use, and its cleanup.

Ranks are threads with a listener each, or processes if a test kills them. The tests use
the links with mmap, read, and write instead of the native core.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.mesh_ranks import JOB, RING, SECRET, SIZE, Ranks, world
from support.waiting import LONG, until

from ringjax.control import handshake
from ringjax.control.handshake import HandshakeRequest, Purpose
from ringjax.control.listener import ConnectionKey
from ringjax.errors import AuthenticationError, PeerLost, StartupError
from ringjax.links import shared_memory
from ringjax.links.mesh import LinkDescriptors, MeshFactory
from ringjax.membership.coordinator import Coordinator

__all__ = ["world"]  # a fixture


def link(mesh: LinkDescriptors, peer: int) -> tuple[Any, ...]:
    (found,) = [link for link in mesh.links if link[1] == peer]
    return found


def check_shared(meshes: list[LinkDescriptors], low: int, high: int) -> None:
    """Checks that both ends share memory and can ring each other's doorbell."""
    one, two = link(meshes[low], high), link(meshes[high], low)
    assert (one[0], two[0], one[3], two[3]) == ("shm", "shm", 0, 1)
    assert one[4] == two[4] == RING
    with mmap.mmap(one[2], SIZE) as here, mmap.mmap(two[2], SIZE) as there:
        text = f"{low} {high}".encode()
        here[100 : 100 + len(text)] = text
        assert there[100 : 100 + len(text)] == text
    os.eventfd_write(one[5], 1)
    assert os.eventfd_read(meshes[high].doorbell) == 1
    os.eventfd_write(two[5], 1)
    assert os.eventfd_read(meshes[low].doorbell) == 1


def check_connected(one: int, two: int, text: bytes, idle: int = 60) -> None:
    """Checks that two sockets are connected, without other data in their buffers."""
    here, there = socket.socket(fileno=os.dup(one)), socket.socket(fileno=os.dup(two))
    with here, there:
        for a, b in ((here, there), (there, here)):
            a.sendall(text)
            b.settimeout(LONG)
            assert b.recv(100) == text
        if here.family != socket.AF_UNIX:
            assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert there.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
            assert here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == idle


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1), (0, 1, 0), (0, 0, 1, 1, 0)])
def test_each_pair_gets_the_right_link(
    world: Callable[..., Ranks], hosts: tuple[int, ...]
) -> None:
    ranks = world(hosts, tcp_streams=3)
    meshes = ranks.build()
    for low in range(ranks.size):
        for high in range(low + 1, ranks.size):
            if hosts[low] == hosts[high]:
                check_shared(meshes, low, high)
                continue
            one, two = link(meshes[low], high), link(meshes[high], low)
            assert (one[0], two[0]) == ("tcp", "tcp")
            assert len(one[2]) == len(two[2]) == 3
            for stream, (a, b) in enumerate(zip(one[2], two[2], strict=True)):
                text = b"%d %d %d" % (low, high, stream)
                check_connected(a, b, text)
            ends = dict(meshes[low].control)[high], dict(meshes[high].control)[low]
            check_connected(*ends, b"c", idle=1)
    assert [sorted(dict(mesh.control)) for mesh in meshes] == [
        [r for r in range(ranks.size) if r != rank] for rank in range(ranks.size)
    ]
    assert ranks.log == []


def test_every_descriptor_is_closed_on_exec(world: Callable[..., Ranks]) -> None:
    for mesh in world((0, 0, 1)).build():
        for fd in mesh.descriptors():
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_communicators_of_some_ranks(world: Callable[..., Ranks]) -> None:
    ranks = world((0, 0, 1, 0))
    ranks.build()
    one, two = ranks.build(1, [1, 3], control=False)
    check_shared([one, two], 0, 1)  # peers count within the communicator
    one, two = ranks.build(2, [2, 3], control=False)
    assert link(one, 1)[0] == link(two, 0)[0] == "tcp"
    assert one.control == two.control == []


def test_communicators_may_be_built_at_different_times(
    world: Callable[..., Ranks],
) -> None:
    ranks = world((0, 1, 0))
    early = ranks.start(7, [0, 1, 2], [2], control=False)
    key = ConnectionKey(0, 7, Purpose.CONTROL, 0, 2)
    until(lambda: ranks.factories[0].listener.has(key))
    ranks.build(0)  # the others' listeners keep the calls for communicator 7
    late = ranks.start(7, [0, 1, 2], [0, 1], control=False)
    meshes = [future.result() for future in (*late, *early)]
    ranks.meshes += meshes
    check_shared(meshes, 0, 2)


def test_without_shared_memory_on_request(world: Callable[..., Ranks]) -> None:
    ranks = world((0, 0, 0), shm=False)
    for mesh in ranks.build():
        assert {link[0] for link in mesh.links} == {"tcp"}
    assert ranks.log == []


def test_missing_shared_memory_causes_one_warning_and_tcp(
    world: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = world((0, 0, 0))
    make, made = shared_memory.create, []

    def scarce(size: int, left: int | None = None) -> int:
        if made:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.append(size)
        return make(size)

    monkeypatch.setattr(shared_memory, "create", scarce)
    meshes = ranks.build()
    kinds = [sorted(link[0] for link in mesh.links) for mesh in meshes]
    # Rank 0 or rank 1 got the only memory. With two peers, rank 0 releases it again.
    assert kinds in (
        [["tcp", "tcp"]] * 3,
        [["tcp", "tcp"], ["shm", "tcp"], ["shm", "tcp"]],
    )
    first = [text for text in ranks.log if "2 x" in text]
    assert first == [
        f"warning: world: 2 x {SIZE} = {2 * SIZE} bytes of shared memory cannot be had "
        "(No space left on device): using TCP on this host, which is slower"
    ]
    one, two = link(meshes[0], 2), link(meshes[2], 0)
    check_connected(one[2][0], two[2][0], b"in spite of that")


def test_memory_that_a_peer_could_shrink_is_refused(
    world: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsealed(size: int, left: int | None = None) -> int:
        fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        return fd

    ranks = world((0, 0))
    monkeypatch.setattr(shared_memory, "create", unsealed)
    low, high = ranks.start(0, [0, 1], [0, 1], control=True)
    with pytest.raises(StartupError, match="memory of another size, or unsealed"):
        high.result()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        low.result()


def test_shared_memory_is_sealed() -> None:
    fd = shared_memory.create(SIZE)
    try:
        assert shared_memory.is_valid(fd, SIZE)
        assert not shared_memory.is_valid(fd, SIZE + 1)
        assert os.fstat(fd).st_blocks * 512 >= SIZE  # the pages are there
        for size in (0, 2 * SIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_creating_more_memory_than_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 0 < shared_memory.available() < 1 << 62
    with pytest.raises(OSError, match="Cannot allocate memory"):
        shared_memory.create(1 << 60)
    monkeypatch.setattr(shared_memory, "available", lambda: 2 * SIZE - 1)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        shared_memory.create(SIZE)


def test_unreachable_ranks_are_named(world: Callable[..., Ranks]) -> None:
    ranks = world((0, 1, 2, 0), start_timeout=2.0)  # within 2 s ranks 0 and 2 connect
    futures = ranks.start(0, range(4), [0, 2], control=True)
    with pytest.raises(StartupError) as error:
        futures[0].result()  # ranks 1 and 3 do not call
    text = str(error.value)
    assert text.startswith(
        "world: rank 0 could not be connected with ranks 1, 3 within"
    )
    assert "rank 1 on host1: it did not call" in text
    with pytest.raises(StartupError, match=r"rank 2 could not be .* rank 3 within 2 s"):
        futures[1].result()


def test_a_departed_rank_is_not_awaited(
    world: Callable[..., Ranks],
) -> None:
    ranks = world((0, 0, 0), start_timeout=2 * LONG)
    futures = ranks.start(0, range(3), [0, 2], control=True)
    ranks.factories[1].loss_monitor.report_failure("ValueError: early")
    for future in futures:
        with pytest.raises(PeerLost, match="rank 1 failed: ValueError") as error:
            future.result(LONG)
        assert error.value.rank == 1


# Foreign and misleading connections to a listener.


def _call(
    factory: MeshFactory, introduction: HandshakeRequest, secret: bytes = SECRET
) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + factory.listener.unix_name)
        handshake.authenticate(sock, secret, introduction)


@pytest.mark.parametrize(
    ("purpose", "caller", "callee"),
    [
        (Purpose.RENDEZVOUS, 1, 0),
        (Purpose.DATA, 1, 1),  # the callee is another rank
        (Purpose.DATA, 0, 0),  # the caller is the callee
        (Purpose.DATA, 5, 0),  # no such rank
        (Purpose.DATA, -1, 0),
    ],
)
def test_wrong_ranks_and_purposes_are_refused(
    world: Callable[..., Ranks], purpose: Purpose, caller: int, callee: int
) -> None:
    ranks = world((0, 0))
    with pytest.raises(AuthenticationError):
        _call(ranks.factories[0], HandshakeRequest(JOB, purpose, caller, callee))
    ranks.build()


def test_garbage_and_the_wrong_secret_do_not_disturb(
    world: Callable[..., Ranks],
) -> None:
    ranks = world((0, 1))
    futures = ranks.start(0, [0, 1], [0], control=True)
    for _ in range(3):
        with pytest.raises(AuthenticationError):
            _call(
                ranks.factories[0], HandshakeRequest(JOB, Purpose.DATA, 1, 0), b"w" * 32
            )
        where = ranks.factories[0].listener.addresses[0].split(":")
        with socket.create_connection((where[0], int(where[1]))) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200)
    futures += ranks.start(0, [0, 1], [1], control=True)
    meshes = [future.result() for future in futures]
    ranks.meshes += meshes
    assert link(meshes[0], 1)[0] == "tcp"
    assert len(ranks.log) == 2  # a line for each kind of socket


def test_a_second_connection_replaces_the_first(world: Callable[..., Ranks]) -> None:
    ranks = world((0, 0))
    listener = ranks.factories[0].listener
    for comm in (9, 9, 9, 10):  # the last call arrives after the others
        _call(ranks.factories[0], HandshakeRequest(JOB, Purpose.DATA, 1, 0, comm=comm))
    key = ConnectionKey(0, 9, Purpose.DATA, 0, 1)
    accepted = listener.accept(key, LONG)
    assert accepted is not None
    accepted.sock.close()
    assert listener.accept(key, 0.05) is None
    assert not listener.has(key)


# With processes.

WORKER = """
import sys, time
from ringjax.config import Config
from ringjax.links.mesh import MeshFactory
from ringjax.control.listener import LinkListener
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import join
rank, where = int(sys.argv[1]), sys.argv[2]
secret, job = b"s" * 32, sys.argv[4]
listener = LinkListener(secret, job, rank=rank, size=2, hosts=["127.0.0.1"], log=print,
                      failed=print)
hello = {"rank": rank, "size": 2, "hostname": "h", "machine": "m", "shm": True,
         "door": listener.unix_name, "addresses": ",".join(listener.addresses)}
client = join(JobCredentials(where, secret, job), rank, hello, 40)
factory = MeshFactory(rank=rank, members=client.members, hosts=(0, int(sys.argv[3])),
                epoch=0, job=job, secret=secret, config=Config(start_timeout=40),
                listener=listener, loss_monitor=client, shm_bytes=lambda ring: 2 * ring,
                segment_bytes=lambda size, tile: size * tile,
                log=lambda level, text: print(text))
mesh = factory.build(0, [0, 1], "world", control=True)
assert not {"jax", "numpy", "asyncio"} & {name.split(".")[0] for name in sys.modules}
print("ready", flush=True)
import os, select
control = mesh.control[0][1]
select.select([control], [], [])
print("noticed", os.read(control, 1), flush=True)
"""


@pytest.mark.parametrize("host", [0, 1])
def test_a_killed_process_is_detected_and_leaves_nothing(host: int) -> None:
    job = secrets.token_hex(8)
    server = Coordinator(SECRET, job, np=2, on_loss="stop")
    server.start()
    command = [sys.executable, "-c", WORKER]
    workers = [
        subprocess.Popen(
            [*command, str(rank), server.addresses[0], str(host), job],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        workers[1].send_signal(signal.SIGKILL)
        assert workers[0].stdout is not None
        assert workers[0].stdout.readline() == "noticed b''\n"
        assert workers[0].wait(LONG) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        server.close()
    doors = Path("/proc/net/unix").read_text()
    assert f"ringjax-{job}-" not in doors
