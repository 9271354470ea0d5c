"""Tests that a listener keeps calls for future epochs and refuses calls for past ones.

test_mesh.py tests calls within one epoch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from support.waiting import LONG

from ringjax.control import addresses, handshake
from ringjax.control.handshake import HandshakeRequest, Purpose
from ringjax.control.listener import ConnectionKey, LinkListener
from ringjax.errors import AuthenticationError

SECRET, JOB = b"s" * 32, "0123456789abcdef"


@pytest.fixture
def listener() -> Iterator[LinkListener]:
    found = LinkListener(
        *(SECRET, JOB),
        rank=-1,
        hosts=["127.0.0.1"],
        log=lambda text: None,
        failed=pytest.fail,
    )
    yield found
    found.close()


def call(listener: LinkListener, epoch: int) -> ConnectionKey:
    with addresses.connect("\0" + listener.unix_name, LONG) as sock:
        said = HandshakeRequest(JOB, Purpose.CONTROL, 3, 1, epoch)
        handshake.authenticate(sock, SECRET, said, LONG)
    return ConnectionKey(epoch, 0, Purpose.CONTROL, 0, 3)


def test_calls_for_past_and_future_epochs(listener: LinkListener) -> None:
    early, next_one = call(listener, 4), call(listener, 7)
    listener.discard_before(5)
    assert listener.accept(early, 0.0) is None
    accepted = listener.accept(next_one, LONG)
    assert accepted is not None and not accepted.key
    accepted.sock.close()
    with pytest.raises(AuthenticationError):
        call(listener, 4)
    assert "e" in listener.unix_name
    assert listener.hello_entries()["addresses"] == listener.addresses[0]


def test_an_error_with_one_caller_does_not_affect_the_next(
    listener: LinkListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_refusal_of", lambda request: 1 / 0)
    with pytest.raises((AuthenticationError, OSError)):
        call(listener, 1)
    monkeypatch.undo()
    accepted = listener.accept(call(listener, 1), LONG)
    assert accepted is not None
    accepted.sock.close()


def test_an_error_of_the_listening_thread_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    ended = threading.Event()

    def failed(text: str) -> None:
        said.append(text)
        ended.set()

    nowhere = {"hosts": [], "log": lambda text: None}
    found = LinkListener(SECRET, JOB, rank=-1, **nowhere, failed=failed)  # type: ignore[arg-type]
    try:
        monkeypatch.setattr(found._acceptor, "expire", lambda: 1 / 0)
        os.eventfd_write(found._wakeup, 1)
        assert ended.wait(LONG)
        what = "the listening thread of this rank failed: ZeroDivisionError"
        assert said[0].startswith(what)
    finally:
        found.close()
