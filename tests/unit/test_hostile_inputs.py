"""Tests each parser with thousands of damaged inputs. `make fuzz` uses many more.

Another test checks that the search finds planted defects.
"""

from __future__ import annotations

import pytest
from fuzz.damage import MAX_MEMORY, BadInputError, Target, fuzz
from fuzz.python_targets import targets


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_damaged_inputs_are_refused(target: Target) -> None:
    assert fuzz(target, runs=4000, seed=6) == 4000


def _reads_behind_the_end(data: bytes) -> None:
    if data[:1] == b"\x05" and len(data) < 6:
        raise IndexError("the planted one")


def _takes_what_it_is_told(data: bytes) -> None:
    if len(data) > 4:  # a few zeros suffice, because gigabytes take seconds
        bytearray(min(int.from_bytes(data[:4], "big"), MAX_MEMORY + 1))


def _does_not_end(data: bytes) -> None:
    while len(data) > 4:
        pass


@pytest.mark.parametrize(
    ("run", "seed", "found"),
    [
        (_reads_behind_the_end, b"\x05abcdef", "the planted one"),
        (_takes_what_it_is_told, b"\x00\x00\x01\x00more", "took"),
        (_does_not_end, b"abcdef", "took more than 0.2 s"),
    ],
)
def test_the_search_finds_planted_defects(  # type: ignore[no-untyped-def]
    run, seed, found, monkeypatch
) -> None:
    monkeypatch.setattr("fuzz.damage.MAX_SECONDS", 0.2)
    with pytest.raises(BadInputError, match=found):
        fuzz(Target("planted", run, [seed], (ValueError,)), runs=20_000)
