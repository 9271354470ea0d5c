"""Who is at the other end: mutual HMAC-SHA256 challenge and response on a connection.

Four messages of fixed size prove to both ends that the other knows the job's secret:
    caller -> callee   introduction: job, purpose, TLS, epoch, comm, ranks, nonce
    callee -> caller   its nonce, TLS, HMAC(callee key, all so far)
    caller -> callee   HMAC(caller key, all so far)
    callee -> caller   HMAC(welcome key, all so far)
The keys differ by direction and job, so that nothing can be replayed or reflected.
Afterwards either JSON messages flow, sealed with an HMAC and a counter and inside TLS
if both ends can (tls.py), or, on links between ranks, the bytes of the native core:
plain (an attacker on the path could alter them), or encrypted if an end requires it. As
the HMACs cover what both say of TLS, nobody between them can talk them out of it.
The protocol is a pure state machine; sockets are driven below it and in `Door`.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import os
import resource
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from ringjax.control.sealing import Keys
from ringjax.control.tls import Layer, Offer, agree
from ringjax.control.unix_peer import peer_uid
from ringjax.errors import AuthenticationError

LIMIT = 5.0  # seconds for a whole handshake
MOST_PENDING = 1024  # connections in a handshake at once; then some give way
_BUSY = b"RINGJAX busy"  # to a caller that gives way: it may come again
_MAGIC = b"RINGJAX\x02"
_INTRODUCTION = struct.Struct("!8s8sBBHIIii32s")
_NONCE, _MAC = 32, 32
_ANSWER = struct.Struct("!32sB")  # nonce, offer


class Purpose(enum.IntEnum):
    """What a connection is for; part of what both ends prove."""

    RENDEZVOUS = 1
    CONTROL = 2
    DATA = 3
    AGENT = 4

    @property
    def links(self) -> bool:
        """Whether it is a connection between ranks."""
        return self in (Purpose.CONTROL, Purpose.DATA)


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a connection claims to be. Ranks are world ranks, -1 is a server.

    Attributes:
        tls: what the caller says of it; not to be trusted before it has proved itself.
    """

    job: str
    purpose: Purpose
    caller: int
    callee: int
    epoch: int = 0
    comm: int = 0
    stream: int = 0
    tls: Offer = Offer.NONE

    def pack(self, nonce: bytes) -> bytes:
        """The first message."""
        return _INTRODUCTION.pack(
            _MAGIC,
            bytes.fromhex(self.job),
            self.purpose,
            self.tls,
            self.stream,
            self.epoch,
            self.comm,
            self.caller,
            self.callee,
            nonce,
        )

    @staticmethod
    def unpack(message: bytes) -> Introduction:
        """Reads the first message; AuthenticationError if it is something else."""
        magic, job, purpose, tls, stream, epoch, comm, caller, callee, _ = (
            _INTRODUCTION.unpack(message)
        )
        if magic != _MAGIC:
            raise AuthenticationError(f"does not speak ringjax: {message[:8]!r}")
        try:
            known = Purpose(purpose)
        except ValueError:
            raise AuthenticationError(f"unknown purpose {purpose}") from None
        return Introduction(
            job.hex(), known, caller, callee, epoch, comm, stream, _offer(tls)
        )


def _offer(number: int) -> Offer:
    try:
        return Offer(number)
    except ValueError:
        raise AuthenticationError(f"says {number} of TLS") from None


class _Schedule:
    """Keys of one job and connection: HKDF (RFC 5869) with one block per label."""

    def __init__(self, secret: bytes, job: str) -> None:
        self._root = hmac.digest(bytes.fromhex(job), secret, "sha256")

    def key(self, label: bytes) -> bytes:
        return hmac.digest(self._root, b"ringjax " + label + b"\x01", "sha256")

    def mac(self, label: bytes, transcript: bytes) -> bytes:
        return hmac.digest(self.key(label), transcript, "sha256")


# Yields (bytes to send, how many bytes it wants next), takes these, returns its result.
_Steps = Generator[tuple[bytes, int], bytes, tuple[Introduction, Keys]]


def call(secret: bytes, introduction: Introduction) -> _Steps:
    """The caller's half."""
    schedule = _Schedule(secret, introduction.job)
    said = introduction.pack(secrets.token_bytes(_NONCE))
    answer = yield said, _ANSWER.size + _MAC
    said += answer[: _ANSWER.size]
    _verify(answer[_ANSWER.size :], schedule.mac(b"callee", said))
    said += answer[_ANSWER.size :]
    proof = schedule.mac(b"caller", said)
    said += proof
    link = introduction.purpose.links
    theirs = _offer(_ANSWER.unpack_from(answer)[1])
    try:
        encrypted = agree(introduction.tls, theirs, link=link)
    except AuthenticationError:
        yield proof, 0  # so that the other end can say the same with certainty
        raise
    welcome = yield proof, _MAC
    _verify(welcome, schedule.mac(b"welcome", said))
    layer, key = None, b""
    if encrypted:
        layer = Layer(schedule.mac(b"tls", said), server=False)
        root = schedule.mac(b"link", said) if link else b""
        key = yield from layer.handshake(root)
    keys = Keys(schedule.mac(b"up", said), schedule.mac(b"down", said), layer, key)
    return introduction, keys


def answer(
    secret: bytes,
    job: str,
    accepts: Callable[[Introduction], str],
    tls: Offer = Offer.NONE,
) -> _Steps:
    """The callee's half. `accepts` returns why it refuses, or nothing."""
    schedule = _Schedule(secret, job)
    said = yield b"", _INTRODUCTION.size
    introduction = Introduction.unpack(said)
    if introduction.job != job:
        raise AuthenticationError(f"belongs to job {introduction.job}, not to {job}")
    if why := accepts(introduction):
        raise AuthenticationError(why)
    reply = _ANSWER.pack(secrets.token_bytes(_NONCE), tls)
    reply += schedule.mac(b"callee", said + reply)
    said += reply
    proof = yield reply, _MAC
    _verify(proof, schedule.mac(b"caller", said))
    said += proof
    link = introduction.purpose.links
    encrypted = agree(tls, introduction.tls, link=link)
    welcome, layer, key = schedule.mac(b"welcome", said), None, b""
    if encrypted:
        layer = Layer(schedule.mac(b"tls", said), server=True)
        root = schedule.mac(b"link", said) if link else b""
        key = yield from layer.handshake(root, welcome)
    else:
        yield welcome, 0
    keys = Keys(schedule.mac(b"down", said), schedule.mac(b"up", said), layer, key)
    return introduction, keys


def _verify(mac: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(mac, expected):
        raise AuthenticationError("does not know this job's secret")


def introduce(
    sock: socket.socket, secret: bytes, introduction: Introduction, limit: float = LIMIT
) -> Keys:
    """Calls on a connected socket and waits for the proof of the other end.

    Raises:
        AuthenticationError: the other end refuses, or cannot prove itself.
        TimeoutError, OSError: it does not answer.
    """
    deadline = time.monotonic() + limit
    steps = call(secret, introduction)
    output, wants = next(steps)
    while True:
        sock.settimeout(_left(deadline))
        sock.sendall(output)
        received = b""
        while len(received) < wants:
            sock.settimeout(_left(deadline))
            piece = sock.recv(wants - len(received))
            if not piece and received == _BUSY:
                raise ConnectionAbortedError("it has too many callers at once")
            if not piece:
                raise AuthenticationError(
                    "closed the connection during the handshake: it belongs to another "
                    "job, has another secret, or refuses this rank"
                )
            received += piece
        try:
            output, wants = steps.send(received)
        except StopIteration as finished:
            keys: Keys = finished.value[1]
            return keys


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def turn(
    selector: selectors.BaseSelector,
    seconds: float,
    fault: Callable[[Any, Exception], None],
) -> None:
    """One round of a loop whose selector holds callables as data.

    What one of them raises is told to `fault`, with what it was called for, and does
    not keep the others from their turns.
    """
    for key, _ in selector.select(seconds):
        # An earlier callable may have closed this one, and its number may be in use
        # again for another socket.
        now = selector.get_map().get(key.fd)
        if now is not None and now.fileobj is key.fileobj:
            try:
                now.data(key.fileobj)
            except Exception as error:
                fault(key.fileobj, error)


class _Guest:
    """A connection in its handshake."""

    def __init__(self, sock: socket.socket, where: str, steps: _Steps) -> None:
        self.sock, self.where, self.steps = sock, where, steps
        self.deadline = time.monotonic() + LIMIT
        self.received = b""
        self.heard = 0  # messages; with the first one it has named this job
        self.wants = next(steps)[1]


class Door:
    """Listening sockets that let in only connections that prove themselves.

    It works inside a loop over `selector`, whose entries carry a callable as data, and
    which calls `sweep` about once a second while it is `busy`. A stranger costs at
    most one of MOST_PENDING places for LIMIT seconds and less than 100 bytes. When all
    are taken the oldest one gives way that has not named this job, which ranks do at
    once; only if there is none, the oldest rank, and it is told to come again.

    Args:
        steps: starts a callee's half of a handshake, see `answer`, for a socket.
        admit: takes the socket (not blocking) of whoever proved itself.
        log: takes a sentence about a refusal, at most one a minute for an address.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        selector: selectors.BaseSelector,
        steps: Callable[[socket.socket], _Steps],
        admit: Callable[[socket.socket, str, Introduction, Keys], None],
        log: Callable[[str], None],
    ) -> None:
        self._listeners, self._selector = list(listeners), selector
        self._steps, self._admit, self._log = steps, admit, log
        self._guests: dict[socket.socket, _Guest] = {}
        # Most of the descriptors are not for strangers.
        self._places = max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._refused: dict[str, float] = {}  # address -> when it was logged
        for listener in self._listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, self._enter)

    @property
    def busy(self) -> bool:
        """Whether somebody is in a handshake, so that `sweep` matters."""
        return bool(self._guests)

    def _enter(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        sock.setblocking(False)
        where = address[0] if isinstance(address, tuple) else "this host"
        if why := _stranger(sock):
            sock.close()
            self._refuse(where, why)
            return
        if len(self._guests) >= min(MOST_PENDING, self._places):
            self._make_room()
        self._guests[sock] = _Guest(sock, where, self._steps(sock))
        self._selector.register(sock, selectors.EVENT_READ, self._hear)
        self._hear(sock)  # most have said who they are already

    def _make_room(self) -> None:
        guests = self._guests.values()
        silent = next((guest for guest in guests if not guest.heard), None)
        oldest = silent or next(iter(guests))
        self._dismiss(oldest, "gave way to newer connections")

    def _hear(self, sock: socket.socket) -> None:
        guest = self._guests[sock]
        try:
            piece = sock.recv(guest.wants - len(guest.received))
            if not piece:
                # A caller that has seen our proof and stops there does not believe it.
                doubt = ": it has another secret" if guest.wants == _MAC else ""
                raise AuthenticationError(f"left before proving itself{doubt}")
            guest.received += piece
            if len(guest.received) < guest.wants:
                return
            output, guest.wants = guest.steps.send(guest.received)
            guest.received = b""
            guest.heard += 1
            if sock.send(output) < len(output):  # a fresh socket takes 64 bytes
                raise AuthenticationError("does not read")
        except BlockingIOError:
            return
        except (AuthenticationError, OSError) as error:
            self._turn_away(guest, str(error))
            return
        if not guest.wants:
            self._welcome(guest)

    def _welcome(self, guest: _Guest) -> None:
        self._forget(guest)
        try:
            guest.steps.send(b"")
        except StopIteration as finished:
            introduction, keys = finished.value
            self._admit(guest.sock, guest.where, introduction, keys)

    def fault(self, sock: Any, error: Exception) -> None:
        """A callable of this door, or of the loop that it is in, has raised.

        The connection that it was about ends; anything else is tried again.
        """
        why = f"caused {type(error).__name__}: {error}"
        if sock in self._guests:
            self._dismiss(self._guests[sock], why)
        else:
            # Out of descriptors, perhaps: then the connection stays in the queue, and
            # a pause keeps this from being a busy loop.
            self._refuse("a caller", why)
            time.sleep(0.05)

    def sweep(self) -> None:
        """Ends the handshakes that take too long."""
        now = time.monotonic()
        for guest in [g for g in self._guests.values() if g.deadline <= now]:
            self._dismiss(guest, f"did not prove itself within {LIMIT:g} s")

    def _forget(self, guest: _Guest) -> None:
        del self._guests[guest.sock]
        self._selector.unregister(guest.sock)

    def _dismiss(self, guest: _Guest, why: str) -> None:
        """Ends a handshake that may be genuine, but takes too long."""
        if guest.heard == 1:  # in the place of the next proof
            with contextlib.suppress(OSError):
                guest.sock.send(_BUSY)
        self._turn_away(guest, why)

    def _turn_away(self, guest: _Guest, why: str) -> None:
        self._forget(guest)
        guest.sock.close()
        self._refuse(guest.where, why)

    def _refuse(self, where: str, why: str) -> None:
        now = time.monotonic()
        if now - self._refused.get(where, -60.0) < 60.0:
            return
        if len(self._refused) >= 1024:  # many addresses: forget, do not grow
            self._refused.clear()
        self._refused[where] = now
        self._log(f"refused a connection from {where}: it {why}")

    def close(self) -> None:
        """Closes the listening sockets and everything that has not proved itself.

        The selector must be closed before: in a forked child it is shared with the
        parent, which would lose what is unregistered here.
        """
        for sock in (*self._guests, *self._listeners):
            sock.close()
        self._guests.clear()
        self._listeners.clear()


def _stranger(sock: socket.socket) -> str:
    """Why the process behind a local socket is refused: it belongs to another user."""
    if sock.family != socket.AF_UNIX:
        return ""
    uid = peer_uid(sock)
    return "" if uid == os.geteuid() else f"belongs to user {uid}"
