"""Where programs spend their time, and where one is more than the others.

A rank tells of few lines, each with its share. All ranks of a job run one program, so
what a slow one has that the others have not is why it is slow: a line that loads data,
a compiler, garbage collection; or more of the same, if its processor is slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

GARBAGE = "garbage collection"
_MOST_BYTES = 180  # of the heartbeat's room for it
_BETWEEN = "|"


def packed(spent: Mapping[str, float]) -> str:
    """The places with the largest shares, in percent, as a short text.

    Args:
        spent: seconds by place.

    Example:
        >>> packed({"a.py:3 in load": 1.0, "a.py:7 in step": 3.0, "a.py:9 in f": 0.01})
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


def unpacked(text: str) -> dict[str, float]:
    """Shares by place. What is not of that form is one place.

    Example:
        >>> unpacked("75 a.py:7 in step|25 a.py:3 in load")
        {'a.py:7 in step': 0.75, 'a.py:3 in load': 0.25}
        >>> unpacked("a.py:7 in step")
        {'a.py:7 in step': 1.0}
    """
    found = {}
    for part in filter(None, text.split(_BETWEEN)):
        percent, _, place = part.partition(" ")
        told = place and percent.isascii() and percent.isdigit() and len(percent) <= 3
        found[place if told else part] = int(percent) / 100 if told else 1.0
    return found


def apart(own: str, others: Iterable[str]) -> str:
    """The place where one rank is more than is usual; empty: nothing is known.

    Args:
        own: what it told, packed.
        others: what the others told.

    Example:
        >>> usual = ["90 a.py:7 in step|10 a.py:3 in load"] * 2
        >>> apart("75 a.py:7 in step|25 a.py:3 in load", usual)
        'a.py:3 in load'
    """
    import statistics  # rarely needed, and ringrun is to start in a moment

    mine = unpacked(own)
    theirs = [unpacked(text) for text in others]

    def more(place: str) -> float:
        usual = statistics.median([one.get(place, 0.0) for one in theirs] or [0.0])
        return mine[place] - usual

    return max(mine, key=more, default="")
