"""Tests of the handshake: accepted callers, refused callers, and foreign connections.

The first tests use the protocol's state machine without sockets, the later ones use
`Acceptor` on sockets.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import LONG, until

from ringjax.control import acceptor, addresses, handshake
from ringjax.control.acceptor import Acceptor
from ringjax.control.handshake import HandshakeRequest, Purpose
from ringjax.control.sealed_messages import MessageOpener, MessageSealer, SessionKeys
from ringjax.errors import AuthenticationError

SECRET, JOB = b"s" * 32, "0123456789abcdef"
HELLO = HandshakeRequest(
    JOB, Purpose.DATA, caller=3, callee=1, epoch=2, comm=5, stream=1
)


def answer(
    secret: bytes = SECRET, job: str = JOB, refuses: str = ""
) -> handshake.HandshakeSteps:
    return handshake.callee_steps(secret, job, lambda introduction: refuses)


def run_steps(
    caller: handshake.HandshakeSteps,
    callee: handshake.HandshakeSteps,
    tamper: Callable[[int, bytes], bytes] = lambda number, message: message,
) -> tuple[
    tuple[HandshakeRequest, SessionKeys],
    tuple[HandshakeRequest, SessionKeys],
    list[bytes],
]:
    """Runs both sides of a handshake. `tamper` may change each message.

    Returns the results of the callee and the caller, and all messages.
    """
    said, _ = next(caller)
    next(callee)
    transcript = []
    for number in range(4):
        said = tamper(number, said)
        transcript.append(said)
        try:
            said, _ = (callee, caller)[number % 2].send(said)
        except StopIteration as finished:
            called = finished.value
            with pytest.raises(StopIteration) as done:
                callee.send(b"")
            return called, done.value.value, transcript
    raise AssertionError("the caller did not finish")


def test_both_sides_derive_the_same_keys() -> None:
    (mine, keys), (theirs, other), transcript = run_steps(
        handshake.caller_steps(SECRET, HELLO), answer()
    )
    assert mine == theirs == HELLO
    assert (keys.send, keys.receive) == (other.receive, other.send)
    assert keys.send != keys.receive
    assert [len(message) for message in transcript] == [68, 65, 32, 32]
    assert SECRET not in b"".join(transcript)


def test_every_handshake_has_new_keys() -> None:
    one = run_steps(handshake.caller_steps(SECRET, HELLO), answer())
    two = run_steps(handshake.caller_steps(SECRET, HELLO), answer())
    assert one[0][1] != two[0][1]
    assert not set(one[2]) & set(two[2])


@given(st.integers(0, 3), st.integers(0, 67), st.integers(1, 255))
def test_any_changed_byte_is_detected(number: int, place: int, change: int) -> None:
    def tamper(now: int, message: bytes) -> bytes:
        if now != number:
            return message
        changed = bytearray(message)
        changed[place % len(message)] ^= change
        return bytes(changed)

    with pytest.raises(AuthenticationError):
        run_steps(handshake.caller_steps(SECRET, HELLO), answer(), tamper)


@given(st.binary(min_size=68, max_size=68))
def test_garbage_is_refused_at_the_first_message(garbage: bytes) -> None:
    steps = answer()
    next(steps)
    with pytest.raises(AuthenticationError):
        steps.send(garbage)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"job": "fedcba9876543210"}, "belongs to job fedcba9876543210, not to " + JOB),
        ({"purpose": 9}, "unknown purpose 9"),
    ],
)
def test_bad_introductions_are_refused(change: dict[str, object], text: str) -> None:
    steps = answer()
    next(steps)
    with pytest.raises(AuthenticationError, match=text):
        steps.send(replace(HELLO, **change).pack(bytes(32)))  # type: ignore[arg-type]


def test_the_wrong_secret_is_refused_by_both_sides() -> None:
    with pytest.raises(AuthenticationError, match="does not know this job's secret"):
        run_steps(handshake.caller_steps(b"w" * 32, HELLO), answer())
    # A caller that continues nevertheless fails at its next message.
    callee = answer()
    next(callee)
    challenge, _ = callee.send(HELLO.pack(bytes(32)))
    guess = hmac.digest(b"w" * 32, HELLO.pack(bytes(32)) + challenge, "sha256")
    with pytest.raises(AuthenticationError, match="does not know this job's secret"):
        callee.send(guess)


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    recorded = run_steps(handshake.caller_steps(SECRET, HELLO), answer())[2]
    callee = answer()
    next(callee)
    callee.send(recorded[0])
    with pytest.raises(AuthenticationError):
        callee.send(recorded[2])
    caller = handshake.caller_steps(SECRET, HELLO)
    next(caller)
    with pytest.raises(AuthenticationError):
        caller.send(recorded[1])


def test_the_callees_messages_cannot_be_reflected() -> None:
    callee = answer()
    next(callee)
    challenge, _ = callee.send(HELLO.pack(bytes(32)))
    with pytest.raises(AuthenticationError):
        callee.send(challenge[32:])


def test_a_refusal_comes_before_any_proof() -> None:
    steps = answer(refuses="looks for rank 7")
    next(steps)
    with pytest.raises(AuthenticationError, match="looks for rank 7"):
        steps.send(HELLO.pack(bytes(32)))


# Sealed messages.


def test_sealed_messages_may_arrive_in_pieces() -> None:
    sealer, opener = MessageSealer(b"k"), MessageOpener(b"k")
    messages = [{"a": 1}, {"b": ["ü", None]}, {}]
    stream = b"".join(map(sealer.seal, messages))
    found = [m for i in range(len(stream)) for m in opener.feed(stream[i : i + 1])]
    assert found == messages


@given(st.integers(0, 200), st.integers(1, 255))
def test_an_altered_sealed_message_is_detected(place: int, change: int) -> None:
    sealed = bytearray(MessageSealer(b"k").seal({"text": "x" * 20}))
    sealed[place % len(sealed)] ^= change
    opener = MessageOpener(b"k", max_bytes=4096)
    with contextlib.suppress(AuthenticationError):
        # The opener waits for more bytes, because the changed length is larger.
        assert opener.feed(bytes(sealed)) == []


@pytest.mark.parametrize("order", [(0, 0), (1,), (1, 0)])
def test_replayed_lost_and_swapped_messages_are_detected(
    order: tuple[int, ...],
) -> None:
    sealer, opener = MessageSealer(b"k"), MessageOpener(b"k")
    sealed = [sealer.seal({"n": n}) for n in range(2)]
    with pytest.raises(AuthenticationError, match="altered or replayed"):
        for n in order:
            opener.feed(sealed[n])


def test_a_message_of_the_other_direction_is_detected() -> None:
    (_, keys), _, _ = run_steps(handshake.caller_steps(SECRET, HELLO), answer())
    with pytest.raises(AuthenticationError, match="altered or replayed"):
        keys.opener().feed(keys.sealer().seal({}))


def test_oversized_messages_are_refused() -> None:
    with pytest.raises(AuthenticationError, match="announces a message of 4294967295"):
        MessageOpener(b"k").feed(b"\xff" * 36)
    with pytest.raises(ValueError, match="at most 16777216"):
        MessageSealer(b"k").seal({"x": "x" * (17 << 20)})


def test_long_messages_are_compressed() -> None:
    message = {"x": ["a number of texts"] * 1000}
    sealed = MessageSealer(b"k").seal(message)
    assert len(sealed) < 300
    assert MessageOpener(b"k").feed(sealed) == [message]


def test_a_short_message_does_not_become_a_huge_one() -> None:
    text = zlib.compress(b'{"x":"' + b"x" * (17 << 20) + b'"}')
    mac = hmac.digest(b"k", bytes(8) + len(text).to_bytes(4, "big") + text, "sha256")
    with pytest.raises(AuthenticationError, match="too long"):
        MessageOpener(b"k").feed(len(text).to_bytes(4, "big") + mac + text)


def test_sealed_messages_must_be_json_objects() -> None:
    packed = zlib.compress(b"{}")
    for text in (b"[1]", b"{", b"\xff", packed[:-1], packed[:2], b"", packed + b"!"):
        head = len(text).to_bytes(4, "big")
        mac = hmac.digest(b"k", bytes(8) + head + text, "sha256")
        with pytest.raises(
            AuthenticationError, match="other than a JSON object|incomplete"
        ):
            MessageOpener(b"k").feed(head + mac + text)


# Connections to a listener.


class ListenerThread:
    """An `Acceptor` whose loop runs in a thread, and the callers that it accepted."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.accepted: list[tuple[socket.socket, HandshakeRequest]] = []
        self.log: list[str] = []
        listener = addresses.listen("127.0.0.1")
        self.address = listener.getsockname()
        self.acceptor = Acceptor(
            [listener],
            self.selector,
            lambda sock: answer(),
            lambda sock, where, hello, keys: self.accepted.append((sock, hello)),
            self.log.append,
        )
        self.stopping = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.stopping:
            acceptor.run_once(self.selector, 0.01, self.acceptor.on_error)
            self.acceptor.expire()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=LONG)

    def authenticate(self, secret: bytes = SECRET) -> socket.socket:
        sock = self.connect()
        try:
            handshake.authenticate(sock, secret, HELLO)
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        self.stopping = True
        self.thread.join()
        self.selector.close()
        self.acceptor.close()
        for sock, _ in self.accepted:
            sock.close()


@pytest.fixture
def listener_thread() -> Iterator[ListenerThread]:
    listener_thread = ListenerThread()
    yield listener_thread
    listener_thread.close()


def test_a_member_is_accepted(listener_thread: ListenerThread) -> None:
    with listener_thread.authenticate() as sock:
        until(lambda: bool(listener_thread.accepted))
        accepted_sock, hello = listener_thread.accepted[0]
        assert hello == HELLO
        accepted_sock.setblocking(True)
        sock.sendall(b"plain bytes from here on")
        assert accepted_sock.recv(100) == b"plain bytes from here on"


def test_the_wrong_secret_is_logged_once(listener_thread: ListenerThread) -> None:
    for _ in range(5):
        with pytest.raises(
            AuthenticationError, match="does not know this job's secret"
        ):
            listener_thread.authenticate(b"w" * 32)
    listener_thread.authenticate().close()
    until(lambda: bool(listener_thread.accepted))
    assert listener_thread.log == [
        "refused a connection from 127.0.0.1: it left before proving itself: it has "
        "another secret"
    ]


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100,
        b"\0" * 4096,
        b"\xff" * 4096,
        HELLO.pack(bytes(32)) + b"\0" * 32,
        replace(HELLO, job="00" * 8).pack(bytes(32)),
    ],
    ids=["http", "zeros", "ones", "a wrong proof", "another job"],
)
def test_garbage_is_refused_and_members_are_still_accepted(
    listener_thread: ListenerThread, garbage: bytes
) -> None:
    with listener_thread.connect() as client:
        client.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            while client.recv(100):
                pass
    listener_thread.authenticate().close()
    until(lambda: bool(listener_thread.accepted))
    assert len(listener_thread.log) == 1


def test_slow_connections_neither_block_nor_stay(
    listener_thread: ListenerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_TIMEOUT", 3600.0)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(listener_thread.connect()) for _ in range(20)]
        for sock in slow:
            sock.sendall(HELLO.pack(bytes(32))[:5])
        listener_thread.authenticate().close()
        until(lambda: bool(listener_thread.accepted))
        assert len(listener_thread.acceptor._pending) == 20  # none has been closed yet
        monkeypatch.setattr(acceptor, "HANDSHAKE_TIMEOUT", 1.0)
        for pending in list(listener_thread.acceptor._pending.values()):
            pending.deadline = time.monotonic()  # the time limit passes
        for sock in slow:  # the listener closed each one
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    assert not listener_thread.acceptor.has_pending
    until(lambda: listener_thread.log)
    assert "did not prove itself within 1 s" in listener_thread.log[0]


def test_the_oldest_pending_connection_is_closed_first(
    listener_thread: ListenerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "MAX_PENDING", 4)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(listener_thread.connect()) for _ in range(12)]
        listener_thread.authenticate().close()
        until(lambda: bool(listener_thread.accepted))
        assert sockets[0].recv(1) == b""
    assert len(listener_thread.log) == 1


class SlowCaller:
    """A caller that sends its first message and waits until the test calls `finish`."""

    def __init__(self, listener_thread: ListenerThread) -> None:
        self.sock = listener_thread.connect()
        self.steps = handshake.caller_steps(SECRET, HELLO)
        output, self.wants = next(self.steps)
        self.sock.sendall(output)

    def finish(self) -> None:
        while True:
            answer = self.sock.recv(self.wants, socket.MSG_WAITALL)
            try:
                output, self.wants = self.steps.send(answer)
            except StopIteration:
                return
            self.sock.sendall(output)


def test_a_hundred_ranks_may_connect_at_once(listener_thread: ListenerThread) -> None:
    with contextlib.ExitStack() as stack:
        ranks = [SlowCaller(listener_thread) for _ in range(100)]
        for rank in ranks:
            stack.enter_context(rank.sock)
        for rank in ranks:
            rank.finish()
        until(lambda: len(listener_thread.accepted) == 100)
    assert listener_thread.log == []


def test_silent_connections_are_closed_before_ranks(
    listener_thread: ListenerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "MAX_PENDING", 4)
    with contextlib.ExitStack() as stack:
        ranks = [SlowCaller(listener_thread) for _ in range(3)]
        sockets = [stack.enter_context(listener_thread.connect()) for _ in range(20)]
        assert sockets[0].recv(1) == b""
        for rank in ranks:
            stack.enter_context(rank.sock)
            rank.finish()
        until(lambda: len(listener_thread.accepted) == 3)


def test_a_rank_closed_for_newer_ones_is_told_to_retry(
    listener_thread: ListenerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "MAX_PENDING", 2)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listener_thread.connect())
        original = handshake.caller_steps

        def crowded(secret: bytes, hello: HandshakeRequest) -> handshake.HandshakeSteps:
            """Connects two other ranks between this caller's first two messages."""
            steps = original(secret, hello)
            answer = yield next(steps)
            others = [SlowCaller(listener_thread) for _ in range(2)]
            for other in others:
                stack.enter_context(other.sock)
            until(lambda: len(listener_thread.log) == 1)
            answer = yield steps.send(answer)
            return (yield steps.send(answer))

        monkeypatch.setattr(handshake, "caller_steps", crowded)
        with pytest.raises(OSError, match=r"too many callers at once|reset|Broken"):
            handshake.authenticate(sock, SECRET, HELLO)
    until(lambda: listener_thread.log)
    assert "gave way to newer connections" in listener_thread.log[0]


def test_a_callers_wait_is_limited() -> None:
    with (
        addresses.listen("127.0.0.1") as silent,
        socket.create_connection(silent.getsockname()) as sock,
        pytest.raises(TimeoutError),
    ):
        handshake.authenticate(sock, SECRET, HELLO, limit=0.2)


def test_peer_uid_of_a_unix_socket() -> None:
    one, two = socket.socketpair()
    with one, two:
        assert acceptor.peer_uid(one) == os.geteuid()
        assert acceptor._foreign_user(one) == ""


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = socket.socketpair()
    monkeypatch.setattr(acceptor, "peer_uid", lambda sock: 4711)
    with one, two:
        assert acceptor._foreign_user(one) == "belongs to user 4711"
