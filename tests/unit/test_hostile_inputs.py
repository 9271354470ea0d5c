"""Damaged inputs for every parser, for as long as a test may take; `make fuzz` goes on.

And that the search itself finds what is planted.
"""

from __future__ import annotations

import pytest
from fuzz.damage import MOST_MEMORY, Broken, Target, search
from fuzz.python_targets import targets


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_damaged_inputs_are_refused(target: Target) -> None:
    assert search(target, runs=4000, seed=6, seconds=1.5) > 20


def _reads_behind_the_end(data: bytes) -> None:
    if data[:1] == b"\x05" and len(data) < 6:
        raise IndexError("the planted one")


def _takes_what_it_is_told(data: bytes) -> None:
    if len(data) > 4:  # no more than shows: gigabytes of zeros take seconds
        bytearray(min(int.from_bytes(data[:4], "big"), 2 * MOST_MEMORY))


@pytest.mark.parametrize(
    ("run", "seed", "found"),
    [
        (_reads_behind_the_end, b"\x05abcdef", "the planted one"),
        (_takes_what_it_is_told, b"\x00\x00\x01\x00more", "took"),
    ],
)
def test_the_search_finds_what_is_planted(run, seed, found) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Broken, match=found):
        search(Target("planted", run, [seed], (ValueError,)), runs=20_000)
