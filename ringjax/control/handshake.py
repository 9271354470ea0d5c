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
The protocol is a pure state machine; sockets are driven below it and in `Acceptor`.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from ringjax.control.sealed_messages import SessionKeys
from ringjax.control.tls import TlsEndpoint, TlsOffer, agree
from ringjax.errors import AuthenticationError

HANDSHAKE_TIMEOUT = 5.0  # seconds for a whole handshake
BUSY = b"RINGJAX busy"  # to a caller that gives way: it may come again
_MAGIC = b"RINGJAX\x02"
_INTRODUCTION = struct.Struct("!8s8sBBHIIii32s")
_NONCE, MAC_BYTES = 32, 32
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
class HandshakeRequest:
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
    tls: TlsOffer = TlsOffer.NONE

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
    def unpack(message: bytes) -> HandshakeRequest:
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
        return HandshakeRequest(
            job.hex(), known, caller, callee, epoch, comm, stream, _offer(tls)
        )


def _offer(number: int) -> TlsOffer:
    try:
        return TlsOffer(number)
    except ValueError:
        raise AuthenticationError(f"says {number} of TLS") from None


class _KeySchedule:
    """Derives the keys of one connection: HKDF (RFC 5869), one block per label."""

    def __init__(self, secret: bytes, job: str) -> None:
        self._root = hmac.digest(bytes.fromhex(job), secret, "sha256")

    def key(self, label: bytes) -> bytes:
        return hmac.digest(self._root, b"ringjax " + label + b"\x01", "sha256")

    def mac(self, label: bytes, transcript: bytes) -> bytes:
        return hmac.digest(self.key(label), transcript, "sha256")


# Yields (bytes to send, how many bytes it wants next), takes these, returns its result.
HandshakeSteps = Generator[
    tuple[bytes, int], bytes, tuple[HandshakeRequest, SessionKeys]
]


def caller_steps(secret: bytes, introduction: HandshakeRequest) -> HandshakeSteps:
    """The caller's half."""
    schedule = _KeySchedule(secret, introduction.job)
    said = introduction.pack(secrets.token_bytes(_NONCE))
    answer = yield said, _ANSWER.size + MAC_BYTES
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
    welcome = yield proof, MAC_BYTES
    _verify(welcome, schedule.mac(b"welcome", said))
    layer, key = None, b""
    if encrypted:
        layer = TlsEndpoint(schedule.mac(b"tls", said), server=False)
        root = schedule.mac(b"link", said) if link else b""
        key = yield from layer.handshake(root)
    keys = SessionKeys(
        schedule.mac(b"up", said), schedule.mac(b"down", said), layer, key
    )
    return introduction, keys


def callee_steps(
    secret: bytes,
    job: str,
    accepts: Callable[[HandshakeRequest], str],
    tls: TlsOffer = TlsOffer.NONE,
) -> HandshakeSteps:
    """The callee's half. `accepts` returns why it refuses, or nothing."""
    schedule = _KeySchedule(secret, job)
    said = yield b"", _INTRODUCTION.size
    introduction = HandshakeRequest.unpack(said)
    if introduction.job != job:
        raise AuthenticationError(f"belongs to job {introduction.job}, not to {job}")
    if why := accepts(introduction):
        raise AuthenticationError(why)
    reply = _ANSWER.pack(secrets.token_bytes(_NONCE), tls)
    reply += schedule.mac(b"callee", said + reply)
    said += reply
    proof = yield reply, MAC_BYTES
    _verify(proof, schedule.mac(b"caller", said))
    said += proof
    link = introduction.purpose.links
    encrypted = agree(tls, introduction.tls, link=link)
    welcome, layer, key = schedule.mac(b"welcome", said), None, b""
    if encrypted:
        layer = TlsEndpoint(schedule.mac(b"tls", said), server=True)
        root = schedule.mac(b"link", said) if link else b""
        key = yield from layer.handshake(root, welcome)
    else:
        yield welcome, 0
    keys = SessionKeys(
        schedule.mac(b"down", said), schedule.mac(b"up", said), layer, key
    )
    return introduction, keys


def _verify(mac: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(mac, expected):
        raise AuthenticationError("does not know this job's secret")


def authenticate(
    sock: socket.socket,
    secret: bytes,
    introduction: HandshakeRequest,
    limit: float = HANDSHAKE_TIMEOUT,
) -> SessionKeys:
    """Calls on a connected socket and waits for the proof of the other end.

    Raises:
        AuthenticationError: the other end refuses, or cannot prove itself.
        TimeoutError, OSError: it does not answer.
    """
    deadline = time.monotonic() + limit
    steps = caller_steps(secret, introduction)
    output, wants = next(steps)
    while True:
        sock.settimeout(_left(deadline))
        sock.sendall(output)
        received = b""
        while len(received) < wants:
            sock.settimeout(_left(deadline))
            piece = sock.recv(wants - len(received))
            if not piece and received == BUSY:
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
            keys: SessionKeys = finished.value[1]
            return keys


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left
