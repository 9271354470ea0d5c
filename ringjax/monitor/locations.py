"""Where programs spend their time, and where one is more than the others.

A rank tells of few lines, each with its share. All ranks of a job run one program, so
what a slow one has that the others have not is why it is slow: a line that loads data,
a compiler, garbage collection; or more of the same, if its processor is slow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

GARBAGE_COLLECTION = "garbage collection"
IN_COLLECTIVE = " (exchanging)"  # at the end of a place where the program is in a call
_MOST_BYTES = 180  # of the heartbeat's room for it
_BETWEEN = "|"


def pack_shares(spent: Mapping[str, float]) -> str:
    """The places with the largest shares, in percent, as a short text.

    Args:
        spent: seconds by place.

    Example:
        >>> spent = {"a.py:3 in load": 1.0, "a.py:7 in step": 3.0, "a.py:9 in f": 0.01}
        >>> pack_shares(spent)
        '75 a.py:7 in step|25 a.py:3 in load'
    """
    whole = sum(spent.values())
    parts: list[str] = []
    for place in sorted(spent, key=spent.__getitem__, reverse=True):
        percent = round(100 * spent[place] / whole) if whole > 0 else 0
        part = f"{percent} {place.replace(_BETWEEN, '/')}"
        if percent and len(_BETWEEN.join([*parts, part]).encode()) <= _MOST_BYTES:
            parts.append(part)
    return _BETWEEN.join(parts)


def unpack_shares(text: str) -> dict[str, float]:
    """Shares by place. What is not of that form is one place.

    Example:
        >>> unpack_shares("75 a.py:7 in step|25 a.py:3 in load")
        {'a.py:7 in step': 0.75, 'a.py:3 in load': 0.25}
        >>> unpack_shares("a.py:7 in step")
        {'a.py:7 in step': 1.0}
    """
    found = {}
    for part in filter(None, text.split(_BETWEEN)):
        percent, _, place = part.partition(" ")
        told = place and percent.isascii() and percent.isdigit() and len(percent) <= 3
        found[place if told else part] = int(percent) / 100 if told else 1.0
    return found


def distinctive_locations(told: Mapping[int, str]) -> dict[int, str]:
    """The place where each rank is more than is usual; empty: nothing is known.

    A rank that all wait for is not late because of the calls where it waits itself.

    Args:
        told: by rank, pack_shares.

    Example:
        >>> usual = "90 a.py:7 in step|10 a.py:3 in load"
        >>> slow = "75 a.py:7 in step|25 a.py:3 in load"
        >>> distinctive_locations({0: usual, 1: slow, 2: usual})[1]
        'a.py:3 in load'
        >>> slow = "60 a.py:7 in f|40 a.py:9 (exchanging)"
        >>> distinctive_locations({0: "99 a.py:7 in f", 1: slow})[1]
        'a.py:7 in f'
    """
    shares = {rank: unpack_shares(text) for rank, text in told.items()}
    of_place: dict[str, list[float]] = {}
    for mine in shares.values():
        for place, share in mine.items():
            of_place.setdefault(place, []).append(share)
    for known in of_place.values():
        known.sort()

    def more(place: str, share: float) -> tuple[bool, float]:
        excess = share - _usual(of_place[place], len(told), share)
        return not place.endswith(IN_COLLECTIVE), excess

    return {
        rank: max(mine, key=lambda place: more(place, mine[place]), default="")
        for rank, mine in shares.items()
    }


def _usual(known: Sequence[float], ranks: int, own: float) -> float:
    """The median of all ranks but one, whose share is `own`.

    Args:
        known: shares in rising order; the ranks that tell of none have 0.
    """
    nothing, others = ranks - len(known), ranks - 1
    mine = nothing + bisect_left(known, own)

    def other(number: int) -> float:
        number += number >= mine
        return known[number - nothing] if number >= nothing else 0.0

    return (other((others - 1) // 2) + other(others // 2)) / 2 if others else 0.0
