"""What viewers draw: rows of slices for each rank, arrows, counters.

The same for both formats (perfetto.py, chrome.py). Slices of a row lie in each other or
behind each other, never across: what would is on a further row of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ringjax.profile.breakdown import MergedProfile, size
from ringjax.profile.exchanges import RankExchange, as_mapping, boundaries
from ringjax.profile.parts import ProfilePart

LANES = {"compiled": "jit lane", "named": "eager lane"}
MOST_NAMES = 16  # of operations that went together


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """Something with a beginning and an end, in seconds.

    Attributes:
        flow: slices with the same number, not 0, are joined by arrows.
        inner: slices within it.
    """

    name: str
    start: float
    end: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    flow: int = 0
    inner: tuple[TraceSlice, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A thread of the picture."""

    name: str
    slices: list[TraceSlice]


@dataclass(frozen=True, slots=True)
class TraceProcess:
    """A process of the picture: one rank.

    Attributes:
        counters: by name and unit, (seconds, value).
    """

    number: int
    title: str
    rows: list[TraceRow]
    counters: dict[tuple[str, str], list[tuple[float, float]]]


def processes(profile: MergedProfile) -> Iterator[TraceProcess]:
    """All ranks."""
    slices: dict[int, dict[str, list[TraceSlice]]] = {
        id(part): {lane: [] for lane in LANES} for part in profile.parts
    }
    for flow, exchange in enumerate(profile.exchanges, 1):
        last = exchange.last
        joined = flow if len(exchange.shares) > 1 else 0
        for share in exchange.shares:
            lane = slices[id(share.part)][exchange.number[2]]
            lane.append(_slice(share, last, joined))
    for part in profile.parts:
        rows = [TraceRow("step", _steps(profile, part))]
        for name, found in slices[id(part)].items():
            rows += [TraceRow(LANES[name], row) for row in apart(found)]
        yield TraceProcess(part.number, part.title, rows, _counters(profile, part))


def _steps(profile: MergedProfile, part: ProfilePart) -> list[TraceSlice]:
    ends = boundaries(part, profile.base)
    return [
        TraceSlice(f"step {number}", start, end)
        for number, (start, end) in enumerate(pairwise(ends))
    ]


def _slice(share: RankExchange, last: RankExchange, flow: int) -> TraceSlice:
    first = share.calls[0]
    name = f"{first.op} {first.name}".strip()
    arguments = dict(as_mapping(first))
    if len(share.calls) > 1:
        name += f" + {len(share.calls) - 1} more"
        arguments["bytes"] = share.bytes
        arguments["names"] = ", ".join(c.name for c in share.calls[:MOST_NAMES])
    agreed = share.done if share.agreed is None else share.agreed
    inner = [TraceSlice(_waited(share, last), share.entered, agreed)]
    if share.agreed is not None and share.done > agreed:
        inner.append(TraceSlice(_moved(share), agreed, share.done))
    return TraceSlice(name, share.entered, share.done, arguments, flow, tuple(inner))


def _waited(share: RankExchange, last: RankExchange) -> str:
    if share.agreed is None:
        return "wait, in vain"
    if last is share:
        return "agree"
    rank = last.part.rank_in(last.calls[0].epoch)
    return f"wait for {last.part.who if rank is None else f'rank {rank}'}"


def _moved(share: RankExchange) -> str:
    algorithm = share.calls[0].algorithm or "move"
    if share.calls[0].device:
        return f"{algorithm} {size(share.bytes)}, on the device"
    return f"{algorithm} {size(share.bytes)} {size(share.bytes / share.move)}/s"


def _counters(
    profile: MergedProfile, part: ProfilePart
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """What the links carried, between two looks."""
    speeds: list[tuple[float, float]] = []
    for (before, low, _), (after, high, _) in pairwise(part.sent):
        if high >= low and after > before:  # a new epoch counts anew
            start = profile.base.seconds(part, before)
            speeds.append((start, (high - low) / (after - before) / 1e6))
    return {("links, sent", "MB/s"): speeds} if speeds else {}


def apart(slices: Iterable[TraceSlice]) -> list[list[TraceSlice]]:
    """So many rows that none has two slices across each other; at least one.

    Example:
        >>> spans = [("a", 0, 2), ("b", 1, 3), ("c", 2, 4)]
        >>> found = apart([TraceSlice(*span) for span in spans])
        >>> [[s.name for s in row] for row in found]
        [['a', 'c'], ['b']]
    """
    rows: list[list[TraceSlice]] = [[]]
    for one in sorted(slices, key=lambda s: (s.start, s.end)):
        free = (row for row in rows if not row or row[-1].end <= one.start)
        row = next(free, None)
        if row is None:
            row = []
            rows.append(row)
        row.append(one)
    return rows
