"""The picture as Chrome's trace events: one JSON for viewers that know no more.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ringjax.profile.trace import TraceProcess, TraceSlice

Event = dict[str, Any]


def events(processes: Iterable[TraceProcess]) -> Iterator[Event]:
    """All of it. `pid` is the rank; times are microseconds."""
    processes = list(processes)
    arrows = _arrows(processes)
    for process in processes:
        pid = process.number
        yield _meta(pid, "process_name", name=process.title)
        yield _meta(pid, "process_sort_index", sort_index=pid)
        for tid, row in enumerate(process.rows):
            yield _meta(pid, "thread_name", tid, name=row.name)
            yield _meta(pid, "thread_sort_index", tid, sort_index=tid)
            for one in row.slices:
                yield from _slice(one, pid, tid)
                if one.flow:
                    yield _arrow(one, pid, tid, arrows[one.flow])
        for (name, unit), values in process.counters.items():
            for when, value in values:
                yield {
                    "ph": "C", "name": name, "pid": pid, "ts": _us(when),
                    "args": {unit: value},
                }  # fmt: skip


def _arrows(processes: Iterable[TraceProcess]) -> dict[int, list[tuple[float, int]]]:
    """Of each flow the slices, by beginning and process, in the order of time."""
    found: dict[int, list[tuple[float, int]]] = {}
    for process in processes:
        for row in process.rows:
            for one in row.slices:
                found.setdefault(one.flow, []).append((one.start, process.number))
    return {flow: sorted(places) for flow, places in found.items()}


def _arrow(
    one: TraceSlice, pid: int, tid: int, all_of_it: list[tuple[float, int]]
) -> Event:
    place = all_of_it.index((one.start, pid))
    kind = "s" if place == 0 else "f" if place == len(all_of_it) - 1 else "t"
    return {
        "ph": kind, "name": "call", "cat": "ringjax", "id": one.flow, "bp": "e",
        "pid": pid, "tid": tid, "ts": _us(one.start),
    }  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _meta(pid: int, what: str, tid: int = 0, **arguments: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": arguments}


def _slice(one: TraceSlice, pid: int, tid: int) -> Iterator[Event]:
    place = {"pid": pid, "tid": tid}
    whole = {"ts": _us(one.start), "dur": _us(one.end - one.start)}
    yield {"ph": "X", "name": one.name, **place, **whole, "args": one.arguments}
    for inner in one.inner:
        yield from _slice(inner, pid, tid)
