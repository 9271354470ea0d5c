"""Runs both ends of a handshake without sockets; also a mark for tests of TLS."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringjax.control import handshake
from ringjax.control.handshake import HandshakeRequest
from ringjax.control.sealed_messages import SessionKeys
from ringjax.control.tls import TlsOffer, supported

needs_tls = pytest.mark.skipif(not supported(), reason="this Python's ssl has no PSK")


def run_handshake(
    secret: bytes, hello: HandshakeRequest, mine: TlsOffer, theirs: TlsOffer
) -> tuple[SessionKeys, SessionKeys]:
    """Runs both ends of a handshake and returns the keys of the caller and callee."""
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
    # After the handshake the native core reads from the link. It would take bytes that
    # the handshake left unread for its own data.
    assert inbox == [b"", b""], "one end read less than the other end sent"
    return done[0], done[1]
