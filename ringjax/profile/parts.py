"""Reads the files of a profile, one file (*part*) per process.

world/profile_recording.py writes the files. A process that died leaves a file without
an end, and perhaps with half of a line. This module reads all complete lines, and
`describe_missing` lists everything that is missing.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringjax.world.profile_recording import FORMAT, PARTS

MAX_CALLS = 200_000  # most calls to read, the sum over all ranks


class ProfileNotFound(ValueError):
    """Error: the folder contains no profile."""


@dataclass(slots=True)
class RecordedCall:
    """A call or a named operation of one rank, with the field names of the file.

    Attributes:
        entered, agreed, done: the times when this rank entered the call, when all ranks
            had entered the call, and when the call was done, in seconds of the
            process's clock. `agreed` is None if some rank never entered the call.
        code: 0, or the status with which the call failed.
        overlapped: whether the program continued while data moved.
        device: whether a device moves the data, perhaps after `done`.
    """

    op: str
    name: str
    lane: str
    set: int
    epoch: int
    seq: int
    bytes: int
    code: int
    algorithm: str
    entered: float
    agreed: float | None
    done: float
    device: bool = False
    overlapped: bool = False


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """The rank of a process in one epoch. The epoch began at the time `at`."""

    epoch: int
    rank: int
    size: int
    host: str
    at: float


@dataclass(frozen=True, slots=True)
class ClockReading:
    """At `when`, the clock of `rank` was `ahead` (± `trip` / 2) seconds ahead."""

    rank: int
    epoch: int
    when: float
    ahead: float
    trip: float


@dataclass(slots=True)
class ProfilePart:
    """The contents of the part file of one process.

    Attributes:
        who: "rank 3", or "worker 3" in an elastic job.
        clock: an id of the clock, which is equal for processes that share a clock.
        monotonic, realtime: the time of the clock and the seconds since 1970, both at
            the start of the profile.
        marks: the times at which the program has marked the end of a step.
        sent: triples (when, total bytes sent, total exposed seconds).
        lost: how many calls could not be written.
        skipped: how many of the first calls were not read, because of `max_calls`.
        jax: the path of JAX's trace, and the seconds since 1970 at time 0 of the trace.
        notes: sentences for the user about problems of this process.
        end: the time when the file was closed; None if the process died or its disk was
            full.
    """

    path: Path
    who: str
    run: str
    host: str
    clock: str
    monotonic: float
    realtime: float
    members: list[RankAssignment] = field(default_factory=list)
    calls: deque[RecordedCall] = field(default_factory=deque)
    readings: list[ClockReading] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    sent: list[tuple[float, int, float]] = field(default_factory=list)
    lost: int = 0
    skipped: int = 0
    jax: tuple[Path, float] | None = None
    notes: list[str] = field(default_factory=list)
    end: float | None = None

    @property
    def number(self) -> int:
        """The rank, or the worker id in an elastic job."""
        return int(self.who.split()[-1])

    @property
    def title(self) -> str:
        return f"{self.who} · {self.host}"

    @property
    def began(self) -> float:
        return min(self.calls[0].entered if self.calls else math.inf, self.monotonic)

    def rank_in(self, epoch: int) -> int | None:
        """Returns the rank of the process in an epoch, or None if it was no member."""
        return next((m.rank for m in self.members if m.epoch == epoch), None)


def read(directory: Path, max_calls: int = MAX_CALLS) -> list[ProfilePart]:
    """Reads the files of the newest profile in a folder, in rank order.

    Args:
        max_calls: how many calls to read from all files together. From each file, the
            last calls are read.

    Raises:
        ProfileNotFound: the folder contains no profile.
    """
    folder = directory / PARTS
    if not directory.is_dir():
        raise ProfileNotFound(f"{directory}: there is no such folder")
    paths = sorted(folder.glob("*.jsonl"))
    each = max(max_calls // max(len(paths), 1), 1)
    found = [part for path in paths if (part := _read(path, each)) and part.members]
    if not found:
        raise ProfileNotFound(
            f"{directory}: no rank has written a profile there; is it the folder of "
            "ringjax.profile or ringrun --profile?"
        )
    newest = max(found, key=lambda part: part.realtime).run
    return sorted((p for p in found if p.run == newest), key=lambda p: p.number)


def complete(directory: Path, run: str) -> bool:
    """Returns whether all ranks of the last epoch have closed their files."""
    ends = [_end_of(path) for path in (directory / PARTS).glob(f"{run}.*.jsonl")]
    epoch, size = max(ends, default=(-1, 0))
    return 0 < size <= ends.count((epoch, size))


def _end_of(path: Path) -> tuple[int, int]:
    """Returns the last epoch and its size, or (-1, 0) if the file is still open."""
    with open(path, "rb") as file:
        # The last line is short, so the last 4096 bytes suffice.
        file.seek(max(path.stat().st_size - 4096, 0))
        last = file.read().splitlines()[-1:]
    if last and last[0].startswith(b'{"end"'):
        with contextlib.suppress(ValueError):  # the line is not complete yet
            end = json.loads(last[0])
            return end.get("epoch", -1), end.get("size", 0)
    return -1, 0


def describe_missing(parts: list[ProfilePart]) -> list[str]:
    """Returns sentences about missing files and missing calls."""
    found: list[str] = []
    by_epoch: dict[int, dict[int, ProfilePart]] = {}
    sizes: dict[int, int] = {}
    for part in parts:
        for member in part.members:
            by_epoch.setdefault(member.epoch, {})[member.rank] = part
            sizes[member.epoch] = max(member.size, sizes.get(member.epoch, 0))
    for epoch, size in sorted(sizes.items()):
        if gone := sorted(set(range(size)) - set(by_epoch[epoch])):
            named = ", ".join(map(str, gone[:8])) + (" ..." if len(gone) > 8 else "")
            of = f" of epoch {epoch}" if len(sizes) > 1 else ""
            found.append(
                f"rank {named}{of}: no file; if it ran on another host, copy the files "
                f"in {PARTS}/ there into the one here, and run `merge`"
            )
    for part in parts:
        if part.end is None:
            found.append(
                f"{part.who}: its file has no end: it died, or the disk is full"
            )
        if part.skipped:
            found.append(f"{part.who}: its first {part.skipped} calls were left out")
        if part.lost:
            found.append(f"{part.who}: {part.lost} calls came too fast to be written")
        found += [f"{part.who}: {note}" for note in part.notes]
    return found


def _read(path: Path, max_calls: int) -> ProfilePart | None:
    """Reads the file of a process. Returns None if the file has another format."""
    part: ProfilePart | None = None
    names = ("who", "run", "host", "clock", "monotonic", "realtime")
    for value in _values(path):
        if "format" in value:
            if value["format"] != FORMAT:
                return None
            if part is None:
                head = {name: value[name] for name in names}
                part = ProfilePart(path, **head, calls=deque(maxlen=max_calls))
        elif part is not None:
            _add(part, value)
    return part


def _values(path: Path) -> Iterator[dict[str, Any]]:
    # Read NAME.1 first: `PartFile` renames a full file to NAME.1 and continues in NAME.
    for file in (path.with_name(path.name + ".1"), path):
        if not file.exists():
            continue
        with open(file, "rb") as lines:
            for line in lines:
                try:
                    value = json.loads(line)
                except ValueError:
                    continue  # the process died while it wrote this line
                if isinstance(value, dict):
                    yield value


def _add(part: ProfilePart, value: dict[str, Any]) -> None:
    match value:
        case {"op": _}:
            part.skipped += len(part.calls) == part.calls.maxlen
            part.calls.append(RecordedCall(**value))
        case {"epoch": epoch, "rank": rank, "size": size, "host": host, "at": at}:
            member = RankAssignment(epoch, rank, size, host, at)
            if member not in part.members:
                part.members.append(member)
                part.host = host
        case {
            "clock": rank,
            "epoch": epoch,
            "when": when,
            "ahead": ahead,
            "trip": trip,
        }:
            part.readings.append(ClockReading(rank, epoch, when, ahead, trip))
        case {"sent": sent, "exposed": exposed, "at": at}:
            part.sent.append((at, sent, exposed))
        case {"lost": lost}:
            part.lost += lost
        case {"step": when}:
            part.marks.append(when)
        case {"jax": name, "began": began}:
            part.jax = (part.path.with_suffix(".jax") / name, began / 1e9)
        case {"jax_absent": why}:
            part.notes.append(f"without jax's own trace: {why}")
        case {"end": when, "why": why}:
            part.end = when
            if why:
                part.notes.append(f"ended early: {why}")
