"""Tests of building links: the kind of each pair's link, its use, and its cleanup.

Ranks are threads with a listener each, or processes if a test kills them. The tests use
the links with read and write instead of the native core.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.link_ranks import JOB, RING, SECRET, Ranks, host_bytes, world
from support.waiting import LONG, until

from ringjax.control import handshake
from ringjax.control.handshake import HandshakeRequest, Purpose
from ringjax.control.listener import ConnectionKey
from ringjax.errors import AuthenticationError, PeerLost, StartupError
from ringjax.links import shared_memory, standing
from ringjax.links.factory import LinkDescriptors, LinkFactory
from ringjax.membership.coordinator import Coordinator

__all__ = ["world"]  # a fixture


def sockets(links: LinkDescriptors, peer: int) -> list[int]:
    (found,) = [fds for other, fds, _ in links.links if other == peer]
    return found


def check_shared(built: Sequence[LinkDescriptors], ranks: list[int]) -> None:
    """Checks that these ranks share a memory, and a name of their doorbells."""
    memories = [links.memory for links in built]
    assert None not in memories
    assert {memory[1:3] for memory in memories if memory} == {(RING, 0)}
    assert all(memory[3] == ranks for memory in memories if memory)
    fds = [memory[0] for memory in memories if memory]
    size = host_bytes(len(ranks), RING, 0)[1]
    assert all(shared_memory.is_valid(fd, size) for fd in fds)
    assert len({(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in fds}) == 1
    assert len({links.name for links in built}) == 1


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


@pytest.mark.parametrize(
    "hosts", [(0, 0), (0, 1), (0, 1, 0), (0, 0, 1, 1, 0), (0,) * 9, tuple(range(9))]
)
def test_each_pair_gets_the_right_link(
    world: Callable[..., Ranks], hosts: tuple[int, ...]
) -> None:
    ranks = world(hosts, tcp_streams=3, tile_bytes=0)
    built = ranks.build()
    near = [standing.neighbours(rank, hosts) for rank in range(ranks.size)]
    for low in range(ranks.size):
        same = [rank for rank in range(ranks.size) if hosts[rank] == hosts[low]]
        if len(same) > 1:
            check_shared([built[rank] for rank in same], same)
        else:
            assert built[low].memory is None
        far = [rank for rank in near[low] if hosts[rank] != hosts[low]]
        assert sorted(peer for peer, _, _ in built[low].links) == far
        assert sorted(dict(built[low].control)) == near[low]
        for high in (rank for rank in far if rank > low):
            one, two = sockets(built[low], high), sockets(built[high], low)
            assert len(one) == len(two) == 3
            for stream, (a, b) in enumerate(zip(one, two, strict=True)):
                check_connected(a, b, b"%d %d %d" % (low, high, stream))
            ends = dict(built[low].control)[high], dict(built[high].control)[low]
            check_connected(*ends, b"c", idle=1)
    assert len({links.name for links in built}) == len(set(hosts))
    assert ranks.log == []


def test_other_pairs_are_connected_on_demand(world: Callable[..., Ranks]) -> None:
    ranks = world(range(9), tcp_streams=2)
    built = ranks.build()
    assert 3 not in [peer for peer, _, _ in built[0].links]
    one, two = ranks.connect(0, 3)
    for a, b in zip(sockets(one, 3), sockets(two, 0), strict=True):
        check_connected(a, b, b"later")
    assert one.memory is two.memory is None
    assert one.control == two.control == []


def test_a_peer_that_is_not_connected_on_demand_is_named(
    world: Callable[..., Ranks],
) -> None:
    ranks = world(range(9), start_timeout=1.0)
    ranks.build()
    with pytest.raises(StartupError, match=r"rank 0 could not .* rank 3 within 1 s"):
        ranks.factories[0].connect(0, range(9), "world", [3])


def test_every_descriptor_is_closed_on_exec(world: Callable[..., Ranks]) -> None:
    for links in world((0, 0, 1)).build():
        for fd in links.descriptors():
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_communicators_of_some_ranks(world: Callable[..., Ranks]) -> None:
    ranks = world((0, 0, 1, 0), tile_bytes=0)
    ranks.build()
    built = ranks.build(1, [1, 3], control=False)
    check_shared(built, [0, 1])  # peers count within the communicator
    one, two = ranks.build(2, [2, 3], control=False)
    check_connected(sockets(one, 1)[0], sockets(two, 0)[0], b"far")
    assert one.control == two.control == []


def test_communicators_may_be_built_at_different_times(
    world: Callable[..., Ranks],
) -> None:
    ranks = world((0, 1, 0), tile_bytes=0)
    early = ranks.start(7, [0, 1, 2], [2], control=False)
    key = ConnectionKey(0, 7, Purpose.CONTROL, 0, 2)
    until(lambda: ranks.factories[0].listener.has(key))
    ranks.build(0)  # the others' listeners keep the calls for communicator 7
    late = ranks.start(7, [0, 1, 2], [0, 1], control=False)
    built = [future.result() for future in (*late, *early)]
    ranks.built += built
    check_shared([built[0], built[2]], [0, 2])


def test_without_shared_memory_on_request(world: Callable[..., Ranks]) -> None:
    ranks = world((0, 0, 0), shm=False)
    for rank, links in enumerate(ranks.build()):
        assert links.memory is None
        assert sorted(peer for peer, _, _ in links.links) == sorted({0, 1, 2} - {rank})
    assert ranks.log == []


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 0, 0, 1, 1)])
def test_missing_shared_memory_causes_one_warning_and_tcp(
    world: Callable[..., Ranks],
    monkeypatch: pytest.MonkeyPatch,
    hosts: tuple[int, ...],
) -> None:
    ranks = world(hosts, tile_bytes=0)
    make, wanted = shared_memory.create, host_bytes(3, RING, 0)

    def scarce(size: int, allocated: int) -> int:
        if (allocated, size) == wanted:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return make(size, allocated)

    monkeypatch.setattr(shared_memory, "create", scarce)
    built = ranks.build()
    for one in range(3):
        assert built[one].memory is None
        for two in range(one + 1, 3):
            ends = sockets(built[one], two)[0], sockets(built[two], one)[0]
            check_connected(*ends, b"in spite of that")
    if len(hosts) > 3:
        check_shared(built[3:], [3, 4])
    assert ranks.log == [
        "warning: world: 4096 bytes of shared memory cannot be had (No space left on "
        "device): using TCP on this host, which is slower"
    ]


def test_memory_that_a_peer_could_shrink_is_refused(
    world: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsealed(size: int, allocated: int) -> int:
        fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        return fd

    ranks = world((0, 0))
    monkeypatch.setattr(shared_memory, "create", unsealed)
    low, high = ranks.start(0, [0, 1], [0, 1], control=True)
    with pytest.raises(StartupError, match="memory of another size, or unsealed"):
        high.result()
    ranks.built.append(low.result())  # the heartbeat notices that rank 1 is gone


def test_shared_memory_is_sealed() -> None:
    fd = shared_memory.create(8 * RING, 3 * RING)
    try:
        assert shared_memory.is_valid(fd, 8 * RING)
        assert not shared_memory.is_valid(fd, 8 * RING + 1)
        assert os.fstat(fd).st_blocks * 512 == 3 * RING  # these pages are there
        for size in (0, 16 * RING):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_creating_more_memory_than_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 0 < shared_memory.available() < 1 << 62
    with pytest.raises(OSError, match="Cannot allocate memory"):
        shared_memory.create(1 << 60, 1 << 60)
    monkeypatch.setattr(shared_memory, "available", lambda: 2 * RING - 1)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        shared_memory.create(RING, RING)


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
    factory: LinkFactory, introduction: HandshakeRequest, secret: bytes = SECRET
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
    ranks.built += [future.result() for future in futures]
    check_connected(sockets(ranks.built[0], 1)[0], sockets(ranks.built[1], 0)[0], b"x")
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
from ringjax.links.factory import LinkFactory
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
factory = LinkFactory(rank=rank, members=client.members, hosts=(0, int(sys.argv[3])),
                epoch=0, job=job, secret=secret, config=Config(start_timeout=40),
                listener=listener, loss_monitor=client, locate=client.locate,
                host_bytes=lambda ranks, ring, tile: (4096, 1 << 20),
                log=lambda level, text: print(text))
links = factory.build(0, [0, 1], "world", control=True)
assert not {"jax", "numpy", "asyncio"} & {name.split(".")[0] for name in sys.modules}
print("ready", flush=True)
import os, select
control = links.control[0][1]
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
