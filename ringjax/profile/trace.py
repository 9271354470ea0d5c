"""Converts a profile to the terms of trace viewers: processes, threads and slices.

perfetto.py and chrome.py encode the result. Two slices of one thread follow each other,
or one contains the other. A slice that would overlap another slice goes into an
additional thread with the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ringjax.profile.breakdown import MergedProfile, format_size
from ringjax.profile.exchanges import RankExchange, call_details, step_ends
from ringjax.profile.parts import ProfilePart

LANES = {"compiled": "jit lane", "named": "eager lane", "jax": "JAX's collectives"}
MAX_NAMES = 16  # most names shown for a call of several named operations


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """A named interval in a viewer, in seconds.

    Attributes:
        flow: the viewer draws arrows between slices with equal `flow`; 0 for no arrow.
        inner: the slices inside of this slice.
    """

    name: str
    start: float
    end: float
    arguments: Mapping[str, str | int] = field(default_factory=dict)
    flow: int = 0
    inner: tuple[TraceSlice, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceThread:
    """A row of slices in a viewer."""

    name: str
    slices: list[TraceSlice]


@dataclass(frozen=True, slots=True)
class TraceProcess:
    """The data of one rank in a viewer.

    Attributes:
        counters: maps (name, unit) to the (seconds, value) pairs of a curve.
    """

    number: int
    title: str
    threads: list[TraceThread]
    counters: dict[tuple[str, str], list[tuple[float, float]]]


def trace_processes(profile: MergedProfile) -> Iterator[TraceProcess]:
    slices: dict[int, dict[str, list[TraceSlice]]] = {
        id(part): {lane: [] for lane in LANES} for part in profile.parts
    }
    for flow, exchange in enumerate(profile.exchanges, 1):
        last = exchange.last
        joined = flow if len(exchange.ranks) > 1 else 0
        for rank in exchange.ranks:
            lane = slices[id(rank.part)][exchange.call_id[2]]
            lane.append(_slice(rank, last, joined))
    for part in profile.parts:
        threads = [TraceThread("step", _steps(profile, part))]
        for name, found in slices[id(part)].items():
            if name == "jax" and not found:  # most programs have none
                continue
            threads += [TraceThread(LANES[name], each) for each in split_rows(found)]
        yield TraceProcess(part.number, part.title, threads, _counters(profile, part))


def _steps(profile: MergedProfile, part: ProfilePart) -> list[TraceSlice]:
    return [
        TraceSlice(f"step {number}", start, end)
        for number, (start, end) in enumerate(pairwise(step_ends(part, profile.clock)))
    ]


def _slice(rank: RankExchange, last: RankExchange, flow: int) -> TraceSlice:
    first = rank.calls[0]
    name = f"{first.op} {first.name}".strip()
    arguments = call_details(first)
    if len(rank.calls) > 1:
        name += f" + {len(rank.calls) - 1} more"
        arguments["bytes"] = rank.bytes
        arguments["names"] = ", ".join(c.name for c in rank.calls[:MAX_NAMES])
    agreed = rank.done if rank.agreed is None else rank.agreed
    inner = [TraceSlice(_wait_name(rank, last), rank.entered, agreed)]
    if rank.agreed is not None and rank.done > agreed:
        inner.append(TraceSlice(_move_name(rank), agreed, rank.done))
    return TraceSlice(name, rank.entered, rank.done, arguments, flow, tuple(inner))


def _wait_name(rank: RankExchange, last: RankExchange) -> str:
    if rank.agreed is None:
        return "wait, in vain"
    if last is rank:
        return "agree"
    number = last.part.rank_in(last.calls[0].epoch)
    return f"wait for {last.part.who if number is None else f'rank {number}'}"


def _move_name(rank: RankExchange) -> str:
    algorithm, size = rank.calls[0].algorithm or "move", format_size(rank.bytes)
    if rank.calls[0].device:
        return f"{algorithm} {size}, on the device"
    return f"{algorithm} {size} {format_size(rank.bytes / rank.move)}/s"


def _counters(
    profile: MergedProfile, part: ProfilePart
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Returns the send throughput of the links over time, from their byte counters."""
    speeds: list[tuple[float, float]] = []
    for (before, low, _), (after, high, _) in pairwise(part.sent):
        # Skip the readings before and after a new epoch, where counters restart at 0.
        if high >= low and after > before:
            start = profile.clock.seconds(part, before)
            speeds.append((start, (high - low) / (after - before) / 1e6))
    return {("links, sent", "MB/s"): speeds} if speeds else {}


def split_rows(slices: Iterable[TraceSlice]) -> list[list[TraceSlice]]:
    """Distributes slices to rows, so that no two slices of a row overlap.

    Example:
        >>> spans = [("a", 0, 2), ("b", 1, 3), ("c", 2, 4)]
        >>> found = split_rows([TraceSlice(*span) for span in spans])
        >>> [[s.name for s in row] for row in found]
        [['a', 'c'], ['b']]
    """
    rows: list[list[TraceSlice]] = [[]]
    for each in sorted(slices, key=lambda s: (s.start, s.end)):
        free = (row for row in rows if not row or row[-1].end <= each.start)
        row = next(free, None)
        if row is None:
            row = []
            rows.append(row)
        row.append(each)
    return rows
