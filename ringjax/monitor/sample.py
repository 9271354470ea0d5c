"""What a rank tells of itself now and then: sums since it began, and its last waits.

One line of JSON; reading it believes nothing. Who sends it and who asks for it is
elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringjax.monitor.stragglers import WaitRecord

BUCKETS = 26  # of a histogram, as the core's recorder has them
_MOST_SUMS = 1024
_MOST_TEXT = 255
_MOST_RANKS = 1 << 20
_MOST = 2.0**63


@dataclass(slots=True)
class CollectiveSums:
    """Of one collective in one lane of one process set; seconds, bytes, calls."""

    calls: int = 0
    bytes: int = 0
    failures: int = 0
    wait_seconds: float = 0.0
    move_seconds: float = 0.0
    wait: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    move: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def add(self, other: CollectiveSums, sign: int = 1) -> None:
        """Adds the other one's numbers, or takes them away."""
        self.calls += sign * other.calls
        self.bytes += sign * other.bytes
        self.failures += sign * other.failures
        self.wait_seconds += sign * other.wait_seconds
        self.move_seconds += sign * other.move_seconds
        self.wait = [a + sign * b for a, b in zip(self.wait, other.wait, strict=True)]
        self.move = [a + sign * b for a, b in zip(self.move, other.move, strict=True)]


CollectiveKey = tuple[str, bool, int]  # collective, of the named lane, process set


@dataclass(slots=True)
class Sample:
    """A rank at one moment.

    Attributes:
        epoch: in which `rank` and `size` hold.
        waiting, moving: seconds in which some call waited, or moved data.
        exposed: seconds that programs have waited for what overlaps with them.
        waits: of the last calls of the world, if not of all then of this `part`.
        place: lines of the program where it is, and how much, see places.py.
        tuned: what autotune has found out.
        memory: bytes of the process.
        step: seconds from one call to the next one of the same name, 0: unknown.
        sums: by collective, lane and process set.
    """

    rank: int
    size: int
    epoch: int = 0
    host: str = ""
    calls: int = 0
    waiting: float = 0.0
    moving: float = 0.0
    exposed: float = 0.0
    waits: list[WaitRecord] = field(default_factory=list)
    part: float = 1.0
    place: str = ""
    tuned: str = ""
    memory: int = 0
    step: float = 0.0
    sums: dict[CollectiveKey, CollectiveSums] = field(default_factory=dict)

    def text(self) -> str:
        """As a line of JSON, without its end.

        Example:
            >>> parse_sample(Sample(0, 2, waits=[(True, 7, 15)]).text()).waits
            [(True, 7, 15)]
        """
        message = {
            name: getattr(self, name)
            for name in ("rank", "size", "part", *_NUMBERS, *_TEXTS)
        }
        waits = [number for each in self.waits for number in map(int, each)]
        sums = [
            [*key, *(getattr(one, name) for name in _SUMS)]
            for key, one in self.sums.items()
        ]
        message |= {"waits": waits, "sums": sums}
        return json.dumps(message, separators=(",", ":"))


_NUMBERS = {
    **dict.fromkeys(("epoch", "calls", "memory"), int),
    **dict.fromkeys(("waiting", "moving", "exposed", "step"), float),
}
_TEXTS = ("host", "place", "tuned")
_PLAIN: dict[str, type] = {
    **dict.fromkeys(("calls", "bytes", "failures"), int),
    **dict.fromkeys(("wait_seconds", "move_seconds"), float),
}
_SUMS = (*_PLAIN, "wait", "move")


def sums(totals: list[dict[str, Any]]) -> dict[CollectiveKey, CollectiveSums]:
    """From what the core's recorder has, see ringjax.stats."""
    return {
        (one["op"], bool(one["named"]), one["set"]): CollectiveSums(
            **{name: one[name] for name in _PLAIN},
            wait=list(one["wait_histogram"]),
            move=list(one["move_histogram"]),
        )
        for one in totals
    }


def parse_sample(text: str) -> Sample:
    """A sample from what a rank has sent.

    Raises:
        ValueError: it is none.

    Example:
        >>> parse_sample('{"rank": 3, "size": 2}')
        Traceback (most recent call last):
        ValueError: rank 3 of 2
    """
    try:
        message = json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(message, dict):
        raise ValueError("not an object")
    size = _number(message.get("size"), int)
    rank = _number(message.get("rank"), int)
    if not rank < size <= _MOST_RANKS:
        raise ValueError(f"rank {rank} of {size}")
    given: dict[str, Any] = {
        name: _number(message.get(name, 0), kind) for name, kind in _NUMBERS.items()
    }
    given["part"] = min(max(_number(message.get("part", 1), float), 1e-3), 1.0)
    given |= {name: _printable(message.get(name, "")) for name in _TEXTS}
    return Sample(
        rank,
        size,
        waits=_read_waits(message.get("waits", [])),
        sums=_read_sums(message.get("sums", [])),
        **given,
    )


def _number(value: Any, kind: type) -> Any:
    right = isinstance(value, int) or (kind is float and isinstance(value, float))
    if not right or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"no number: {value!r:.40}")
    if not 0 <= value < _MOST:
        raise ValueError(f"out of range: {value!r:.40}")
    return kind(value)


def _printable(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"no text: {value!r:.40}")
    return "".join(c if c.isprintable() else "?" for c in value[:_MOST_TEXT])


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"no list: {value!r:.40}")
    return value


def _read_waits(value: Any) -> list[WaitRecord]:
    numbers = [_number(each, int) for each in _list(value)]
    if len(numbers) % 3:
        raise ValueError("half a call")
    triples = zip(*(iter(numbers),) * 3, strict=True)
    return [(bool(named), sequence, us) for named, sequence, us in triples]


def _read_sums(value: Any) -> dict[CollectiveKey, CollectiveSums]:
    if len(_list(value)) > _MOST_SUMS:
        raise ValueError(f"{len(value)} sums")
    return dict(map(_read_one, value))


def _read_one(value: Any) -> tuple[CollectiveKey, CollectiveSums]:
    if len(_list(value)) != 3 + len(_SUMS):
        raise ValueError(f"{len(value)} numbers of a collective")
    op, named, number, *plain, wait, move = value
    numbers = zip(_PLAIN.items(), plain, strict=True)
    one = CollectiveSums(
        **{name: _number(each, kind) for (name, kind), each in numbers},
        wait=_read_histogram(wait),
        move=_read_histogram(move),
    )
    return (_printable(op), bool(named), _number(number, int)), one


def _read_histogram(value: Any) -> list[int]:
    if len(_list(value)) != BUCKETS:
        raise ValueError(f"{len(value)} buckets")
    return [_number(each, int) for each in value]


def subtract_sums(
    now: Mapping[CollectiveKey, CollectiveSums],
    before: Mapping[CollectiveKey, CollectiveSums],
) -> dict[CollectiveKey, CollectiveSums]:
    """What has come since; where numbers are smaller, they have begun anew."""
    found = {}
    for key, one in now.items():
        new = CollectiveSums()
        new.add(one)
        old = before.get(key)
        if old is not None and old.calls <= one.calls and old.bytes <= one.bytes:
            new.add(old, -1)
        if new.calls or new.bytes or new.failures:
            found[key] = new
    return found
