"""Tests of the sockets for ranks' telemetry and `ringjax top`: access, timeouts."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import leaks
from support.waiting import LONG

from ringjax.monitor import sockets
from ringjax.run.hosts.channel import Message
from ringjax.run.hosts.telemetry_relay import TelemetryRelay
from ringjax.run.monitor.top_server import TopServer


class Loop:
    """A selector loop with callbacks as data, like the loops of ringrun and agents."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.sweep: Callable[[], object] = lambda: None

    def run(self) -> None:
        """Runs until nothing is left to read. Unix sockets deliver data immediately."""
        while found := self.selector.select(0):
            for key, _ in found:
                if self.selector.get_map().get(key.fd) is key:
                    key.data()
        self.sweep()


@pytest.fixture
def loop() -> Iterator[Loop]:
    before = leaks.Snapshot.take()
    found = Loop()
    yield found
    for key in list(found.selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    found.selector.close()
    assert not leaks.settle(before.leaked_since, 10)


@pytest.fixture
def forwarded() -> list[Message]:
    return []


@pytest.fixture
def relay(loop: Loop, forwarded: list[Message]) -> TelemetryRelay:
    found = TelemetryRelay(loop.selector, {0, 7}, forwarded.append)
    loop.sweep = found.close_silent
    return found


def _connect_rank(relay: TelemetryRelay, greeting: bytes = b"") -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(f"\0{relay.start_listening()}")
    sock.sendall(greeting)
    sock.settimeout(5)
    return sock


def test_samples_of_ranks_are_forwarded(
    loop: Loop, relay: TelemetryRelay, forwarded: list[Message]
) -> None:
    with _connect_rank(relay, b'{"id":7}\n') as rank:
        loop.run()
        rank.sendall(b"too early\n")
        loop.run()
        relay.set_interval(1.5)
        assert rank.recv(100) == b"1.5\n"
        rank.sendall(b"one\ntw")
        loop.run()
        rank.sendall(b"o\n\xff\n")
        loop.run()
        relay.set_interval(0)
        assert rank.recv(100) == b"0\n"
        rank.sendall(b"too late\n")
        loop.run()
    assert forwarded == [
        {"is": "sample", "id": 7, "text": text} for text in ("one", "two", "\ufffd")
    ]
    # A rank that connects now receives the interval after its hello.
    with _connect_rank(relay, b'{"id":0}\n') as late:
        relay.set_interval(2)
        loop.run()
        assert late.recv(100) == b"2\n"


def test_time_reports_are_forwarded_although_nobody_watches(
    loop: Loop, relay: TelemetryRelay, forwarded: list[Message]
) -> None:
    with _connect_rank(relay, b'{"id":7}\n') as rank:
        rank.sendall(b'{"rank":0}\n{"time":{"age":1.5}}\n')
        loop.run()
        loop.run()
    text = '{"time":{"age":1.5}}'
    assert forwarded == [{"is": "sample", "id": 7, "text": text}]


@pytest.mark.parametrize(
    "greeting",
    [
        b"\n",
        b'{"id":1}\n',
        b'{"id":-7}\n',
        b"x" * 300_000,
        b'{"id":7}\n' + b"x" * 300_000,
    ],
    ids=["empty", "another", "negative", "endless", "endless line"],
)
def test_unknown_ranks_are_disconnected(
    loop: Loop, relay: TelemetryRelay, forwarded: list[Message], greeting: bytes
) -> None:
    relay.set_interval(1)
    sock = socket.socket(socket.AF_UNIX)
    with sock:
        sock.connect(f"\0{relay.start_listening()}")
        sock.setblocking(False)
        left = memoryview(greeting)
        for _ in range(100):
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                left = left[sock.send(left) :] if left else left
            loop.run()
        sock.settimeout(LONG)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(100):  # the relay may have sent an interval before
                pass
    assert forwarded == []


def test_silent_connections_to_the_relay_are_closed(
    loop: Loop, relay: TelemetryRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = "ringjax.run.hosts.telemetry_relay._HELLO_TIMEOUT"
    monkeypatch.setattr(silence, 3600.0)
    with _connect_rank(relay) as silent, _connect_rank(relay, b'{"id":7}\n') as rank:
        loop.run()
        timeout = relay.timeout()
        assert timeout is not None and 0 < timeout <= 3600
        monkeypatch.setattr(silence, 0.0)  # the limit has passed now
        loop.run()
        assert silent.recv(1) == b""
        assert relay.timeout() is None
        relay.set_interval(1)
        assert rank.recv(100) == b"1\n"


def test_the_oldest_of_too_many_connections_is_closed(
    loop: Loop, relay: TelemetryRelay
) -> None:
    relay.set_interval(1)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_connect_rank(relay))
        for _ in range(70):
            stack.enter_context(_connect_rank(relay))
            loop.run()
        assert first.recv(1) == b""
        rank = stack.enter_context(_connect_rank(relay, b'{"id":7}\n'))
        loop.run()
        assert rank.recv(100) == b"1\n"


def test_other_users_cannot_send_samples(
    loop: Loop,
    relay: TelemetryRelay,
    forwarded: list[Message],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "ringjax.run.hosts.telemetry_relay.peer_uid", lambda sock: 12345
    )
    relay.set_interval(1)
    with _connect_rank(relay, b'{"id":7}\nnonsense\n') as stranger:
        loop.run()
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert forwarded == []


def test_a_rank_that_does_not_read_does_not_block(
    loop: Loop, relay: TelemetryRelay
) -> None:
    with _connect_rank(relay, b'{"id":7}\n'):
        loop.run()
        for _ in range(10_000):  # more than fits into the buffer of the kernel
            relay.set_interval(1)


# Clients of `ringjax top`.


@pytest.fixture
def server(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TopServer]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = TopServer(loop.selector, lambda: None)
    loop.sweep = lambda: found.close_silent(time.monotonic())
    yield found
    found.close()
    assert not list(tmp_path.rglob("*.sock"))


def _client(server: TopServer, greeting: bytes = sockets.HELLO) -> socket.socket:
    sock = sockets.connect(server.path)
    sock.sendall(greeting)
    sock.settimeout(5)
    return sock


def test_clients_receive_messages_after_their_hello(
    loop: Loop, server: TopServer
) -> None:
    with _client(server, sockets.HELLO[:5]) as slow, _client(server) as quick:
        loop.run()
        assert len(server) == 1
        server.send(b"one\n")
        slow.sendall(sockets.HELLO[5:])
        loop.run()
        assert len(server) == 2
        server.send(b"two\n")
        loop.run()
        assert quick.recv(100) == b"one\ntwo\n" and slow.recv(100) == b"two\n"
    loop.run()
    assert len(server) == 0


@pytest.mark.parametrize(
    "greeting", [b"GET / HTTP/1.1\r\n", b"\0" * 9, b"ringjax top 2\n"]
)
def test_clients_with_a_wrong_hello_are_disconnected(
    loop: Loop, server: TopServer, greeting: bytes
) -> None:
    with _client(server, greeting) as stranger:
        loop.run()
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert len(server) == 0


def test_silent_clients_are_disconnected(
    loop: Loop, server: TopServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = "ringjax.run.monitor.top_server._HELLO_TIMEOUT"
    monkeypatch.setattr(silence, 3600.0)
    with _client(server, b"") as silent:
        loop.run()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.recv(1)
        monkeypatch.setattr(silence, 0.0)  # the limit has passed now
        loop.run()
        assert silent.recv(1) == b""


def test_clients_that_do_not_read_are_disconnected(
    loop: Loop, server: TopServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = "ringjax.run.monitor.top_server._SEND_TIMEOUT"
    monkeypatch.setattr(patience, 3600.0)
    large = b"x" * (4 << 20) + b"\n"
    with _client(server), _client(server) as reading:  # the first client does not read
        loop.run()
        reading.setblocking(False)
        for _ in range(2):
            got = 0
            server.send(large)
            while got < len(large):
                loop.run()
                got += len(reading.recv(1 << 20))
            assert len(server) == 2
        monkeypatch.setattr(patience, 0.0)  # the limit has passed now
        server.send(large)
        assert len(server) == 1
        assert reading.recv(1 << 20)


def test_the_oldest_of_too_many_clients_is_closed(
    loop: Loop, server: TopServer
) -> None:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(_client(server)) for _ in range(4)]
        loop.run()
        found += [stack.enter_context(_client(server)) for _ in range(6)]
        loop.run()
        assert len(server) == 8
        server.send(b"one\n")
        assert found[0].recv(100) == b"" and found[-1].recv(100) == b"one\n"


def test_other_users_cannot_read(
    loop: Loop, server: TopServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringjax.run.monitor.top_server.peer_uid", lambda sock: 12345)
    with _client(server) as stranger:
        loop.run()
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    monkeypatch.setattr("ringjax.monitor.sockets.peer_uid", lambda sock: 12345)
    with pytest.raises(sockets.JobSocketError, match="it belongs to user 12345"):
        sockets.connect(server.path)
