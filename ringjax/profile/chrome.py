"""Converts a profile to Chrome's trace events, for viewers other than Perfetto.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ringjax.profile.trace import TraceProcess, TraceSlice

Event = dict[str, Any]


def events(processes: Iterable[TraceProcess]) -> Iterator[Event]:
    """Yields all events. The `pid` of an event is the rank; times are microseconds."""
    processes = list(processes)
    flows = _flows(processes)
    for process in processes:
        pid = process.number
        yield _metadata(pid, "process_name", name=process.title)
        yield _metadata(pid, "process_sort_index", sort_index=pid)
        for tid, thread in enumerate(process.threads):
            yield _metadata(pid, "thread_name", tid, name=thread.name)
            yield _metadata(pid, "thread_sort_index", tid, sort_index=tid)
            for each in thread.slices:
                yield from _slice(each, pid, tid)
                if each.flow:
                    yield _arrow(each, pid, tid, flows[each.flow])
        for (name, unit), values in process.counters.items():
            for when, value in values:
                yield {
                    "ph": "C", "name": name, "pid": pid, "ts": _us(when),
                    "args": {unit: value},
                }  # fmt: skip


def _flows(processes: Iterable[TraceProcess]) -> dict[int, list[tuple[float, int]]]:
    """Returns for each flow the start and the process of its slices, in time order."""
    found: dict[int, list[tuple[float, int]]] = {}
    for process in processes:
        for thread in process.threads:
            for each in thread.slices:
                found.setdefault(each.flow, []).append((each.start, process.number))
    return {flow: sorted(slices) for flow, slices in found.items()}


def _arrow(
    each: TraceSlice, pid: int, tid: int, flow: list[tuple[float, int]]
) -> Event:
    index = flow.index((each.start, pid))
    kind = "s" if index == 0 else "f" if index == len(flow) - 1 else "t"
    return {
        "ph": kind, "name": "call", "cat": "ringjax", "id": each.flow, "bp": "e",
        "pid": pid, "tid": tid, "ts": _us(each.start),
    }  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _metadata(pid: int, kind: str, tid: int = 0, **arguments: str | int) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def _slice(each: TraceSlice, pid: int, tid: int) -> Iterator[Event]:
    times = {"ts": _us(each.start), "dur": _us(each.end - each.start)}
    event: Event = {"ph": "X", "name": each.name, "pid": pid, "tid": tid}
    yield event | times | {"args": each.arguments}
    for inner in each.inner:
        yield from _slice(inner, pid, tid)
