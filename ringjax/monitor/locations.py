"""Finds the line of code in which a slow rank spends more time than other ranks.

Each rank sends a few lines of code (*locations*), each with its share of the rank's
time. All ranks of a job run the same program, so a location with a larger share on a
slow rank explains why the rank is slow: for example, it loads data, compiles, or
collects garbage. If only the processor of the rank is slow, all shares are alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

GARBAGE_COLLECTION = "garbage collection"
# The suffix of a location at which the program was inside of a collective.
IN_COLLECTIVE = " (exchanging)"
_MAX_BYTES = 180  # most bytes of packed locations in a message of the heartbeat
_SEPARATOR = "|"


def pack_shares(spent: Mapping[str, float]) -> str:
    """Formats the locations with the largest shares, in percent, as a short text.

    Args:
        spent: seconds by location.

    Example:
        >>> spent = {"a.py:3 in load": 1.0, "a.py:7 in step": 3.0, "a.py:9 in f": 0.01}
        >>> pack_shares(spent)
        '75 a.py:7 in step|25 a.py:3 in load'
    """
    total = sum(spent.values())
    parts: list[str] = []
    for location in sorted(spent, key=spent.__getitem__, reverse=True):
        percent = round(100 * spent[location] / total) if total > 0 else 0
        part = f"{percent} {location.replace(_SEPARATOR, '/')}"
        if percent and len(_SEPARATOR.join([*parts, part]).encode()) <= _MAX_BYTES:
            parts.append(part)
    return _SEPARATOR.join(parts)


def unpack_shares(text: str) -> dict[str, float]:
    """Parses the result of `pack_shares`. Any other text counts as one location.

    Example:
        >>> unpack_shares("75 a.py:7 in step|25 a.py:3 in load")
        {'a.py:7 in step': 0.75, 'a.py:3 in load': 0.25}
        >>> unpack_shares("a.py:7 in step")
        {'a.py:7 in step': 1.0}
    """
    found = {}
    for part in filter(None, text.split(_SEPARATOR)):
        percent, _, location = part.partition(" ")
        # Check isascii, too, because isdigit alone accepts digits that int() refuses.
        packed = percent.isascii() and percent.isdigit() and len(percent) <= 3
        if location and packed:
            found[location] = int(percent) / 100
        else:
            found[part] = 1.0
    return found


def distinctive_locations(packed: Mapping[int, str]) -> dict[int, str]:
    """Returns for each rank the location whose share exceeds that of other ranks most.

    `packed` has the results of `pack_shares` by rank. The result is "" for a rank
    without locations. Locations inside of collectives have the lowest priority, because
    a late rank is not late because of the calls in which it waits for other ranks.

    Example:
        >>> usual = "90 a.py:7 in step|10 a.py:3 in load"
        >>> slow = "75 a.py:7 in step|25 a.py:3 in load"
        >>> distinctive_locations({0: usual, 1: slow, 2: usual})[1]
        'a.py:3 in load'
        >>> slow = "60 a.py:7 in f|40 a.py:9 (exchanging)"
        >>> distinctive_locations({0: "99 a.py:7 in f", 1: slow})[1]
        'a.py:7 in f'
    """
    shares_of = {rank: unpack_shares(text) for rank, text in packed.items()}
    by_location: dict[str, list[float]] = {}
    for shares in shares_of.values():
        for location, share in shares.items():
            by_location.setdefault(location, []).append(share)
    for known in by_location.values():
        known.sort()

    def excess(location: str, share: float) -> tuple[bool, float]:
        usual = _median_of_others(by_location[location], len(packed), share)
        return not location.endswith(IN_COLLECTIVE), share - usual

    return {
        rank: max(shares, key=lambda at: excess(at, shares[at]), default="")
        for rank, shares in shares_of.items()
    }


def _median_of_others(known: Sequence[float], ranks: int, own: float) -> float:
    """Returns the median share of all ranks except the rank with the share `own`.

    `known` has the shares in rising order, except the shares of 0.
    """
    zeros, others = ranks - len(known), ranks - 1
    own_index = zeros + bisect_left(known, own)

    def other(index: int) -> float:
        index += index >= own_index
        return known[index - zeros] if index >= zeros else 0.0

    return (other((others - 1) // 2) + other(others // 2)) / 2 if others else 0.0
