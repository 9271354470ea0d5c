"""Both halves of a handshake without sockets, and helpers for tests of TLS."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringjax.control import handshake
from ringjax.control.handshake import HandshakeRequest
from ringjax.control.sealed_messages import SessionKeys
from ringjax.control.tls import TlsOffer, supported

needs_tls = pytest.mark.skipif(not supported(), reason="this Python's ssl has no PSK")


def converse(
    secret: bytes, hello: HandshakeRequest, mine: TlsOffer, theirs: TlsOffer
) -> tuple[SessionKeys, SessionKeys]:
    """Runs both halves until both have ended and no message is in flight."""
    steps = (
        handshake.caller_steps(secret, replace(hello, tls=mine)),
        handshake.callee_steps(secret, hello.job, lambda introduction: "", theirs),
    )
    inbox, wants, done = [b"", b""], [0, 0], dict[int, SessionKeys]()
    for end in (0, 1):
        output, wants[end] = next(steps[end])
        inbox[1 - end] += output
    while len(done) < 2:
        end = next(e for e in (0, 1) if e not in done and len(inbox[e]) >= wants[e])
        piece, inbox[end] = inbox[end][: wants[end]], inbox[end][wants[end] :]
        try:
            output, wants[end] = steps[end].send(piece)
            inbox[1 - end] += output
        except StopIteration as finished:
            done[end] = finished.value[1]
    # After the handshake the native core reads from the link. Bytes that the handshake
    # left unread would stand before the core's own.
    assert inbox == [b"", b""], "one end took less than the other one said"
    return done[0], done[1]
