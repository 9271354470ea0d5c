"""Reads the part files that world/profile_recording.py writes on each rank.

A rank that died in the middle leaves a part without an end, and perhaps half of a
line: what there is counts, and what is missing is said.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ringjax.world.profile_recording import FORMAT, PARTS

MOST_CALLS = 200_000  # of all ranks, that are read; the last ones


class ProfileNotFound(ValueError):
    """There is nothing to read."""


@dataclass(slots=True)
class RecordedCall:
    """One call of one rank; of named operations one operation.

    Attributes:
        agreed: when all ranks had come; None: they never had.
        entered, agreed, done: seconds of that process's clock.
        overlapped: the program went on meanwhile.
        device: moved by a device, later than `done`.
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
    """From a moment on this process is that rank of so many."""

    epoch: int
    rank: int
    size: int
    host: str
    at: float


@dataclass(frozen=True, slots=True)
class ClockReading:
    """What the clock of a rank showed: `ahead` of ours, known to half of `trip`."""

    rank: int
    epoch: int
    when: float
    ahead: float
    trip: float


@dataclass(slots=True)
class ProfilePart:
    """What one process has written.

    Attributes:
        who: "rank 3", or "worker 3" of an elastic job.
        clock: alike for processes with the same clock.
        monotonic, realtime: that clock, and seconds since 1970, at one moment.
        sent: (when, bytes sent in all, exposed seconds in all).
        lost: calls that were not written.
        skipped: calls that were not read, the first ones.
        jax: JAX's trace, and since when its times count in seconds of 1970.
        end: when it was closed; None: the process died, or its disk was full.
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
        """The rank, or the worker's number."""
        return int(self.who.split()[-1])

    @property
    def title(self) -> str:
        """`rank 3 · host-b`."""
        return f"{self.who} · {self.host}"

    @property
    def began(self) -> float:
        """The first thing that is known of it."""
        return min(self.calls[0].entered if self.calls else math.inf, self.monotonic)

    def rank_in(self, epoch: int) -> int | None:
        """Its rank in that epoch; None if it was not in it."""
        return next((m.rank for m in self.members if m.epoch == epoch), None)


def read(directory: Path, most_calls: int = MOST_CALLS) -> list[ProfilePart]:
    """The parts of the newest profile in a folder, in the order of the ranks.

    Args:
        most_calls: of all ranks; of longer ones the last.

    Raises:
        ProfileNotFound: there are none.
    """
    folder = directory / PARTS
    if not directory.is_dir():
        raise ProfileNotFound(f"{directory}: there is no such folder")
    paths = sorted(folder.glob("*.jsonl"))
    each = max(most_calls // max(len(paths), 1), 1)
    found = [part for path in paths if (part := _read(path, each)) and part.members]
    if not found:
        raise ProfileNotFound(
            f"{directory}: no rank has written a profile there; is it the folder of "
            "ringjax.profile or ringrun --profile?"
        )
    newest = max(found, key=lambda part: part.realtime).run
    return sorted((p for p in found if p.run == newest), key=lambda p: p.number)


def complete(directory: Path, run: str) -> bool:
    """Whether all ranks of its last epoch have closed their parts there."""
    last = [(p.members[-1], p) for p in _heads(directory / PARTS, run) if p.members]
    epoch = max((member.epoch for member, _ in last), default=0)
    here = [(member, part) for member, part in last if member.epoch == epoch]
    sizes = [member.size for member, _ in here]
    return sizes == [len(here)] * len(here) != [] and all(_closed(p) for _, p in here)


def _heads(folder: Path, run: str) -> Iterator[ProfilePart]:
    for path in folder.glob(f"{run}.*.jsonl"):
        if part := _read(path, 1, lines=50):
            yield part


def _closed(part: ProfilePart) -> bool:
    with open(part.path, "rb") as file:
        file.seek(max(part.path.stat().st_size - 4096, 0))
        last = file.read().splitlines()[-1:]
    return bool(last) and last[0].startswith(b'{"end"')


def missing(parts: list[ProfilePart]) -> list[str]:
    """A sentence for each thing that is not there."""
    said: list[str] = []
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
            said.append(
                f"rank {named}{of}: no file; if it ran on another host, copy the files "
                f"in {PARTS}/ there into the one here, and run `merge`"
            )
    for part in parts:
        if part.end is None:
            said.append(
                f"{part.who}: its file has no end: it died, or the disk is full"
            )
        if part.skipped:
            said.append(f"{part.who}: its first {part.skipped} calls were left out")
        if part.lost:
            said.append(f"{part.who}: {part.lost} calls came too fast to be written")
        said += [f"{part.who}: {note}" for note in part.notes]
    return said


def _read(path: Path, most_calls: int, lines: int | None = None) -> ProfilePart | None:
    """One part; None if it is none, or of another version."""
    part: ProfilePart | None = None
    for value in islice(_values(path), lines):
        if "format" in value:
            if value["format"] != FORMAT:
                return None
            if part is None:
                part = _begun(path, value, most_calls)
        elif part is not None:
            _add(part, value)
    return part


def _begun(path: Path, head: dict[str, Any], most_calls: int) -> ProfilePart:
    names = ("who", "run", "host", "clock", "monotonic", "realtime")
    calls: deque[RecordedCall] = deque(maxlen=most_calls)
    return ProfilePart(path, **{name: head[name] for name in names}, calls=calls)


def _values(path: Path) -> Iterator[dict[str, Any]]:
    for file in (path.with_name(path.name + ".1"), path):
        if not file.exists():
            continue
        with open(file, "rb") as lines:
            for line in lines:
                try:
                    value = json.loads(line)
                except ValueError:
                    continue  # the process died while it wrote that
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
