"""Mutual authentication of a new connection by HMAC-SHA256 challenge and response.

Four messages of fixed size prove to both ends that the other end knows the secret of
the job. Each HMAC covers all earlier bytes of the handshake (the *transcript*)::

    caller -> callee   request: job, purpose, TLS offer, epoch, comm, ranks, nonce
    callee -> caller   nonce, TLS offer, HMAC(callee key)
    caller -> callee   HMAC(caller key)
    callee -> caller   HMAC(welcome key)

The keys differ by job and direction, so an attacker can neither replay nor reflect a
message. The HMACs cover both TLS offers, so an attacker on the path cannot make the two
ends continue without TLS.

After the handshake, a server and its peers exchange JSON messages, each with an HMAC
and a counter (sealed_messages.py), and inside TLS if both ends support TLS (tls.py). On
links between ranks, the native core sends tensors. The core encrypts tensors only if an
end requires TLS. Without encryption an attacker on the path could alter tensors.

The protocol is a state machine without I/O. `authenticate` runs the state machine on
the socket of a caller, and acceptor.py on the sockets of a server.
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
BUSY = b"RINGJAX busy"  # the reply if too many callers wait: the caller tries again
_MAGIC = b"RINGJAX\x02"
_REQUEST = struct.Struct("!8s8sBBHIIii32s")
_NONCE_BYTES, MAC_BYTES = 32, 32
_ANSWER = struct.Struct("!32sB")  # nonce, TLS offer


class Purpose(enum.IntEnum):
    """The purpose of a connection. The HMACs of both ends cover the purpose, too."""

    RENDEZVOUS = 1
    CONTROL = 2
    DATA = 3
    AGENT = 4

    @property
    def is_link(self) -> bool:
        """Whether the connection is between two ranks."""
        return self in (Purpose.CONTROL, Purpose.DATA)


@dataclass(frozen=True, slots=True)
class HandshakeRequest:
    """The first message of a handshake, in which the caller describes the connection.

    Attributes:
        job: the id of the job, 16 hexadecimal digits.
        caller: the caller's world rank or worker id; 0 for an agent of ringrun.
        callee: the world rank to which the caller connects; -1 for a server.
        epoch: the epoch of a link.
        comm: the id of the communicator of a link.
        stream: the index of a data connection within its link.
        tls: the TLS offer of the caller. Do not trust the offer before the caller has
            authenticated.
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
        return _REQUEST.pack(
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
        """Parses the first message. Raises AuthenticationError if it is malformed."""
        magic, job, purpose, tls, stream, epoch, comm, caller, callee, _ = (
            _REQUEST.unpack(message)
        )
        if magic != _MAGIC:
            raise AuthenticationError(f"does not speak ringjax: {message[:8]!r}")
        try:
            known = Purpose(purpose)
        except ValueError:
            raise AuthenticationError(f"unknown purpose {purpose}") from None
        return HandshakeRequest(
            job.hex(), known, caller, callee, epoch, comm, stream, _read_offer(tls)
        )


def _read_offer(number: int) -> TlsOffer:
    try:
        return TlsOffer(number)
    except ValueError:
        raise AuthenticationError(f"says {number} of TLS") from None


class _KeySchedule:
    """Derives the keys of one connection by HKDF (RFC 5869), one block per label."""

    def __init__(self, secret: bytes, job: str) -> None:
        self._root = hmac.digest(bytes.fromhex(job), secret, "sha256")

    def mac(self, label: bytes, transcript: bytes) -> bytes:
        """Returns the HMAC of the transcript under the key of this label.

        The result can also serve as a key: only the two ends of this connection can
        compute it, because the transcript contains both nonces.
        """
        key = hmac.digest(self._root, b"ringjax " + label + b"\x01", "sha256")
        return hmac.digest(key, transcript, "sha256")


# One end of a handshake. The generator yields the bytes to send and the count of bytes
# to receive, and its `send` takes the received bytes. The count 0 means that the
# handshake is over. The generator returns the request and the keys of the session.
HandshakeSteps = Generator[
    tuple[bytes, int], bytes, tuple[HandshakeRequest, SessionKeys]
]


def caller_steps(secret: bytes, request: HandshakeRequest) -> HandshakeSteps:
    """Runs the handshake on the side that connects."""
    schedule = _KeySchedule(secret, request.job)
    transcript = request.pack(secrets.token_bytes(_NONCE_BYTES))
    answer = yield transcript, _ANSWER.size + MAC_BYTES
    transcript += answer[: _ANSWER.size]
    _verify(answer[_ANSWER.size :], schedule.mac(b"callee", transcript))
    transcript += answer[_ANSWER.size :]
    proof = schedule.mac(b"caller", transcript)
    transcript += proof
    is_link = request.purpose.is_link
    peer = _read_offer(_ANSWER.unpack_from(answer)[1])
    try:
        encrypted = agree(request.tls, peer, is_link=is_link)
    except AuthenticationError:
        # Send the HMAC before raising the error. The callee then trusts this caller's
        # TLS offer, so the callee's error also names TLS as the reason.
        yield proof, 0
        raise
    welcome = yield proof, MAC_BYTES
    _verify(welcome, schedule.mac(b"welcome", transcript))
    tls, link_key = None, b""
    if encrypted:
        tls = TlsEndpoint(schedule.mac(b"tls", transcript), server=False)
        root = schedule.mac(b"link", transcript) if is_link else b""
        link_key = yield from tls.handshake(root)
    up, down = schedule.mac(b"up", transcript), schedule.mac(b"down", transcript)
    return request, SessionKeys(up, down, tls, link_key)


def callee_steps(
    secret: bytes,
    job: str,
    refusal_of: Callable[[HandshakeRequest], str],
    tls_offer: TlsOffer = TlsOffer.NONE,
) -> HandshakeSteps:
    """Runs the handshake on the side that accepts the connection.

    Args:
        refusal_of: returns why a request is refused, or "" to accept the request.
    """
    schedule = _KeySchedule(secret, job)
    transcript = yield b"", _REQUEST.size
    request = HandshakeRequest.unpack(transcript)
    if request.job != job:
        raise AuthenticationError(f"belongs to job {request.job}, not to {job}")
    if why := refusal_of(request):
        raise AuthenticationError(why)
    reply = _ANSWER.pack(secrets.token_bytes(_NONCE_BYTES), tls_offer)
    reply += schedule.mac(b"callee", transcript + reply)
    transcript += reply
    proof = yield reply, MAC_BYTES
    _verify(proof, schedule.mac(b"caller", transcript))
    transcript += proof
    is_link = request.purpose.is_link
    encrypted = agree(tls_offer, request.tls, is_link=is_link)
    welcome, tls, link_key = schedule.mac(b"welcome", transcript), None, b""
    if encrypted:
        tls = TlsEndpoint(schedule.mac(b"tls", transcript), server=True)
        root = schedule.mac(b"link", transcript) if is_link else b""
        link_key = yield from tls.handshake(root, welcome)
    else:
        yield welcome, 0
    up, down = schedule.mac(b"up", transcript), schedule.mac(b"down", transcript)
    return request, SessionKeys(down, up, tls, link_key)


def _verify(mac: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(mac, expected):
        raise AuthenticationError("does not know this job's secret")


def authenticate(
    sock: socket.socket,
    secret: bytes,
    request: HandshakeRequest,
    limit: float = HANDSHAKE_TIMEOUT,
) -> SessionKeys:
    """Runs the caller's end of the handshake on a connected socket.

    The whole handshake may take `limit` seconds.

    Raises:
        AuthenticationError: the other end refuses the request or does not know the
            secret.
        OSError: the other end sends no reply, or replies that it has too many callers.
    """
    deadline = time.monotonic() + limit
    steps = caller_steps(secret, request)
    output, expected = next(steps)
    while True:
        sock.settimeout(_left(deadline))
        sock.sendall(output)
        received = b""
        while len(received) < expected:
            sock.settimeout(_left(deadline))
            piece = sock.recv(expected - len(received))
            if not piece and received == BUSY:
                raise ConnectionAbortedError("it has too many callers at once")
            if not piece:
                raise AuthenticationError(
                    "closed the connection during the handshake: it belongs to another "
                    "job, has another secret, or refuses this rank"
                )
            received += piece
        try:
            output, expected = steps.send(received)
        except StopIteration as finished:
            keys: SessionKeys = finished.value[1]
            return keys


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left
