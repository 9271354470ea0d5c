"""Calls for an epoch that has not come yet wait; those of one that is over are refused.

What a reception does within one epoch is in test_mesh.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from support.waiting import LONG

from ringjax.control import addresses, handshake
from ringjax.control.handshake import Introduction, Purpose
from ringjax.control.listener import Key, Reception
from ringjax.errors import AuthenticationError

SECRET, JOB = b"s" * 32, "0123456789abcdef"


@pytest.fixture
def reception() -> Iterator[Reception]:
    found = Reception(
        *(SECRET, JOB),
        rank=-1,
        hosts=["127.0.0.1"],
        log=lambda text: None,
        failed=pytest.fail,
    )
    yield found
    found.close()


def call(reception: Reception, epoch: int) -> Key:
    with addresses.connect("\0" + reception.door, LONG) as sock:
        said = Introduction(JOB, Purpose.CONTROL, 3, 1, epoch)
        handshake.introduce(sock, SECRET, said, LONG)
    return Key(epoch, 0, Purpose.CONTROL, 0, 3)


def test_epochs_come_and_go(reception: Reception) -> None:
    early, next_one = call(reception, 4), call(reception, 7)
    reception.retire(5)
    assert reception.take(early, 0.0) is None
    arrival = reception.take(next_one, LONG)
    assert arrival is not None and not arrival.key
    arrival.sock.close()
    with pytest.raises(AuthenticationError):
        call(reception, 4)
    assert "e" in reception.door
    assert reception.described()["addresses"] == reception.addresses[0]


def test_what_goes_wrong_with_one_caller_is_nothing_to_the_next(
    reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "_accepts", lambda introduction: 1 / 0)
    with pytest.raises((AuthenticationError, OSError)):
        call(reception, 1)
    monkeypatch.undo()
    arrival = reception.take(call(reception, 1), LONG)
    assert arrival is not None
    arrival.sock.close()


def test_a_thread_that_ends_unasked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    ended = threading.Event()

    def failed(text: str) -> None:
        said.append(text)
        ended.set()

    nowhere = {"hosts": [], "log": lambda text: None}
    found = Reception(SECRET, JOB, rank=-1, **nowhere, failed=failed)  # type: ignore[arg-type]
    try:
        monkeypatch.setattr(found._door, "sweep", lambda: 1 / 0)
        os.eventfd_write(found._wakeup, 1)
        assert ended.wait(LONG)
        what = "the listening thread of this rank failed: ZeroDivisionError"
        assert said[0].startswith(what)
    finally:
        found.close()
