"""Calls for an epoch that has not come yet wait; those of one that is over are refused.

What a reception does within one epoch is in test_mesh.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringjax.control import addresses, handshake
from ringjax.control.handshake import Introduction, Purpose
from ringjax.control.listener import Key, Reception
from ringjax.errors import AuthenticationError

SECRET, JOB = b"s" * 32, "0123456789abcdef"


@pytest.fixture
def reception() -> Iterator[Reception]:
    found = Reception(SECRET, JOB, rank=-1, hosts=["127.0.0.1"], log=lambda text: None)
    yield found
    found.close()


def call(reception: Reception, epoch: int) -> Key:
    with addresses.connect("\0" + reception.door, 5) as sock:
        said = Introduction(JOB, Purpose.CONTROL, 3, 1, epoch)
        handshake.introduce(sock, SECRET, said, 5)
    return Key(epoch, 0, Purpose.CONTROL, 0, 3)


def test_epochs_come_and_go(reception: Reception) -> None:
    early, next_one = call(reception, 4), call(reception, 7)
    reception.retire(5)
    assert reception.take(early, 0.0) is None
    sock = reception.take(next_one, 5)
    assert sock is not None
    sock.close()
    with pytest.raises(AuthenticationError):
        call(reception, 4)
    assert "e" in reception.door
    assert reception.described()["addresses"] == reception.addresses[0]
