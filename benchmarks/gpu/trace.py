"""Reads a profile of jax.profiler: the kernels, with times and streams of the GPU.

Computes from these times the share of the communication during which other kernels ran.
The module reads the JSON file of a trace, and makes no profile.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Kernels of ringjax and of NCCL, and the copies that NCCL uses with one rank.
COMMUNICATION = re.compile(r"rj_(un)?pack|rj_seal|nccl|onerankreduce", re.IGNORECASE)
Interval = tuple[float, float]


class TraceError(RuntimeError):
    """Error: the profile does not contain the requested data."""


@dataclass(frozen=True)
class Kernel:
    """A kernel or a copy that ran on a stream; times are in µs."""

    name: str
    stream: str
    start: float
    end: float

    @property
    def communicates(self) -> bool:
        """Whether the kernel is part of an allreduce of ringjax."""
        return COMMUNICATION.search(self.name) is not None


def find(folder: Path) -> Path:
    """Returns the newest trace below a folder.

    Raises:
      TraceError: there is no trace.
    """
    found = sorted(folder.rglob("*.trace.json.gz"), key=lambda p: p.stat().st_mtime)
    if not found:
        seen = sorted(p.name for p in folder.rglob("*") if p.is_file())
        raise TraceError(f"no *.trace.json.gz in the profile, only {seen[:5]}")
    return found[-1]


def read(path: Path) -> list[Kernel]:
    """Returns all kernels and copies on streams of GPUs, in the order of their start.

    Raises:
      TraceError: the trace contains no stream of a GPU.
    """
    with gzip.open(path, "rt") as file:
        return kernels(json.load(file).get("traceEvents", []))


def kernels(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    events = list(events)
    devices, threads = set(), {}
    for event in events:
        if event.get("ph") != "M":
            continue
        name = str(event.get("args", {}).get("name", ""))
        if event.get("name") == "process_name" and "/device:GPU" in name:
            devices.add(event.get("pid"))
        if event.get("name") == "thread_name":
            threads[event.get("pid"), event.get("tid")] = name
    # Other lines of the device repeat the same time by module or by operation.
    streams = {
        key: name
        for key, name in threads.items()
        if key[0] in devices and name.lower().startswith("stream")
    }
    if not streams:
        names = sorted(n for key, n in threads.items() if key[0] in devices)
        raise TraceError(f"no stream of a GPU in the profile, only {names[:8]}")
    out = []
    for event in events:
        stream = streams.get((event.get("pid"), event.get("tid")))
        if event.get("ph") == "X" and stream is not None:
            start = float(event["ts"])
            end = start + float(event.get("dur", 0.0))
            out.append(Kernel(str(event.get("name", "")), stream, start, end))
    return sorted(out, key=lambda kernel: kernel.start)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges intervals that overlap; the result is in order."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Returns the time in both lists, which are in order and without overlaps."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            out.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


@dataclass(frozen=True)
class Overlap:
    """Communication and overlap: times in µs; `hidden` is a share, 0 to 1."""

    communication: float
    computation: float
    hidden: float
    kernels: int
    streams: tuple[str, ...]


def overlap(found: Sequence[Kernel]) -> Overlap:
    """Computes how much of the communication other streams have hidden.

    Raises:
      TraceError: the profile contains no communication, or only communication.
    """
    ours = [k for k in found if k.communicates]
    others = [k for k in found if not k.communicates]
    if not ours or not others:
        names = sorted({k.name for k in found})
        raise TraceError(
            f"{len(ours)} kernels of the allreduce and {len(others)} others; there are "
            f"{names[:12]}"
        )
    streams = {k.stream for k in ours}
    busy = union((k.start, k.end) for k in ours)
    # Ignore its own stream, where only rounding of times can make two kernels overlap.
    beside = union((k.start, k.end) for k in others if k.stream not in streams)
    computing = union((k.start, k.end) for k in others)
    hidden = length(common(busy, beside)) / max(length(busy), 1e-9)
    return Overlap(
        length(busy), length(computing), hidden, len(ours), tuple(sorted(streams))
    )
