"""A sample has the totals of one rank, and the waiting times of its last calls.

A sample is sent as one line of JSON. `parse_sample` checks every field, because a rank
may run on another host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ringjax.monitor.stragglers import LANES, WaitRecord

BUCKETS = 26  # buckets of a histogram, as Totals::kBuckets of the native core
_MAX_COLLECTIVES = 1024
_MAX_TEXT = 255  # most characters of a text in a sample
_MAX_RANKS = 1 << 20
_END_OF_NUMBERS = 2.0**63
_Number = TypeVar("_Number", int, float)


@dataclass(slots=True)
class CollectiveSums:
    """Totals of one collective in one lane of one process set.

    Attributes:
        wait, move: histograms of the calls by waiting time and by moving time, see
            ringjax.stats.
    """

    calls: int = 0
    bytes: int = 0
    failures: int = 0
    wait_seconds: float = 0.0
    move_seconds: float = 0.0
    wait: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    move: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def add(self, other: CollectiveSums, sign: int = 1) -> None:
        self.calls += sign * other.calls
        self.bytes += sign * other.bytes
        self.failures += sign * other.failures
        self.wait_seconds += sign * other.wait_seconds
        self.move_seconds += sign * other.move_seconds
        self.wait = [a + sign * b for a, b in zip(self.wait, other.wait, strict=True)]
        self.move = [a + sign * b for a, b in zip(self.move, other.move, strict=True)]


# The collective, its lane, and the id of its process set.
CollectiveKey = tuple[str, str, int]


@dataclass(slots=True)
class Sample:
    """The statistics of one rank at one moment.

    Attributes:
        epoch: the epoch to which `rank` and `size` belong.
        waiting: seconds in which at least one call waited for other ranks.
        moving: seconds in which at least one call moved data.
        exposed: seconds that programs have waited for overlapped calls.
        waits: the waiting times of the last calls of the world's communicators.
        part: the fraction of these calls that `waits` contains.
        place: the lines of Python where the program spends its time, see locations.py.
        tuned: a text about the result of autotune; "" if there is none.
        fabric: the provider of RINGJAX_FABRIC; "" if there is none.
        memory: resident bytes of the process.
        step: seconds of a training step, estimated from repeated calls; 0 if unknown.
        sums: totals by collective, lane and process set.
        faults: attempts to make a call that wrong bits have spoiled, see ringjax.stats.
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
    fabric: str = ""
    memory: int = 0
    step: float = 0.0
    sums: dict[CollectiveKey, CollectiveSums] = field(default_factory=dict)
    faults: int = 0

    def text(self) -> str:
        """Formats the sample as a line of JSON, without the newline.

        Example:
            >>> parse_sample(Sample(0, 2, waits=[(1, 7, 15)]).text()).waits
            [(1, 7, 15)]
        """
        message = {
            name: getattr(self, name)
            for name in ("rank", "size", "part", *_INTEGERS, *_FLOATS, *_TEXTS)
        }
        waits = [number for each in self.waits for number in each]
        sums = [
            [*key, *(getattr(totals, name) for name in _SUMS)]
            for key, totals in self.sums.items()
        ]
        message |= {"waits": waits, "sums": sums}
        return json.dumps(message, separators=(",", ":"))


_INTEGERS = ("epoch", "calls", "memory", "faults")
_FLOATS = ("waiting", "moving", "exposed", "step")
_TEXTS = ("host", "place", "tuned", "fabric")
_SUMS_INTEGERS = ("calls", "bytes", "failures")
_SUMS_FLOATS = ("wait_seconds", "move_seconds")
_SUMS = (*_SUMS_INTEGERS, *_SUMS_FLOATS, "wait", "move")


def sums(totals: list[dict[str, Any]]) -> dict[CollectiveKey, CollectiveSums]:
    """Converts the totals that the native core's recorder returns."""
    return {
        (one["op"], one["lane"], one["set"]): CollectiveSums(
            **{name: one[name] for name in (*_SUMS_INTEGERS, *_SUMS_FLOATS)},
            wait=list(one["wait_histogram"]),
            move=list(one["move_histogram"]),
        )
        for one in totals
    }


def parse_sample(text: str) -> Sample:
    """Parses the line that a rank has sent. Raises ValueError if it is no sample.

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
    size = checked_number(message.get("size"), int)
    rank = checked_number(message.get("rank"), int)
    if not rank < size <= _MAX_RANKS:
        raise ValueError(f"rank {rank} of {size}")
    fields: dict[str, Any] = {
        name: checked_number(message.get(name, 0), int) for name in _INTEGERS
    }
    fields |= {name: checked_number(message.get(name, 0), float) for name in _FLOATS}
    fields |= {name: printable_text(message.get(name, "")) for name in _TEXTS}
    return Sample(
        rank,
        size,
        part=min(max(checked_number(message.get("part", 1), float), 1e-3), 1.0),
        waits=_parse_waits(message.get("waits", [])),
        sums=_parse_sums(message.get("sums", [])),
        **fields,
    )


def checked_number(value: object, kind: type[_Number]) -> _Number:
    """Returns a finite number that is not negative. Raises ValueError otherwise."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or (kind is int and isinstance(value, float))
        or not math.isfinite(value)
    ):
        raise ValueError(f"no number: {value!r:.40}")
    if not 0 <= value < _END_OF_NUMBERS:
        raise ValueError(f"out of range: {value!r:.40}")
    return kind(value)


def printable_text(value: object) -> str:
    """Returns a text cut and without control characters. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"no text: {value!r:.40}")
    return "".join(c if c.isprintable() else "?" for c in value[:_MAX_TEXT])


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"no list: {value!r:.40}")
    return value


def _parse_waits(value: object) -> list[WaitRecord]:
    numbers = [checked_number(each, int) for each in _list(value)]
    if len(numbers) % 3:
        raise ValueError("half a call")
    return list(zip(*(iter(numbers),) * 3, strict=True))


def _parse_sums(value: object) -> dict[CollectiveKey, CollectiveSums]:
    rows = _list(value)
    if len(rows) > _MAX_COLLECTIVES:
        raise ValueError(f"{len(rows)} sums")
    return dict(map(_parse_collective, rows))


def _parse_collective(value: object) -> tuple[CollectiveKey, CollectiveSums]:
    row = _list(value)
    if len(row) != 3 + len(_SUMS):
        raise ValueError(f"{len(row)} numbers of a collective")
    op, lane, process_set, *numbers = row
    if lane not in LANES:
        raise ValueError(f"no lane: {lane!r:.40}")
    totals = CollectiveSums(
        checked_number(numbers[0], int),
        checked_number(numbers[1], int),
        checked_number(numbers[2], int),
        wait_seconds=checked_number(numbers[3], float),
        move_seconds=checked_number(numbers[4], float),
        wait=_parse_histogram(numbers[5]),
        move=_parse_histogram(numbers[6]),
    )
    return (printable_text(op), lane, checked_number(process_set, int)), totals


def _parse_histogram(value: object) -> list[int]:
    counts = _list(value)
    if len(counts) != BUCKETS:
        raise ValueError(f"{len(counts)} buckets")
    return [checked_number(each, int) for each in counts]


def subtract_sums(
    now: Mapping[CollectiveKey, CollectiveSums],
    before: Mapping[CollectiveKey, CollectiveSums],
) -> dict[CollectiveKey, CollectiveSums]:
    """Returns the increase since `before`, omitting collectives without new calls."""
    found = {}
    for key, totals in now.items():
        new = CollectiveSums()
        new.add(totals)
        old = before.get(key)
        # Smaller totals mean that the process has restarted and counts from 0 again.
        if old is not None and old.calls <= totals.calls and old.bytes <= totals.bytes:
            new.add(old, -1)
        if new.calls or new.bytes or new.failures:
            found[key] = new
    return found
