"""Calls of all ranks brought together: one exchange each, and whom it waited for.

In a call of all ranks whoever waited least has come last; each rank has measured that
on its own clock, so no error of clocks gets into it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringjax.profile.clocks import CommonClock
from ringjax.profile.parts import ProfilePart, RecordedCall
from ringjax.world.step_counter import CallKind, find_step_marker

# Epoch, process set, lane, number of the call there: the same on all ranks.
Number = tuple[int, int, str, int]


@dataclass(slots=True)
class RankExchange:
    """What one rank had of an exchange, in seconds of the time base.

    Attributes:
        entered: of several named operations in one call: when the last one was there.
        calls: those operations, or the one call.
    """

    part: ProfilePart
    calls: list[RecordedCall]
    entered: float
    agreed: float | None
    done: float

    @property
    def wait(self) -> float:
        """Seconds until all had come."""
        return (self.done if self.agreed is None else self.agreed) - self.entered

    @property
    def move(self) -> float:
        """Seconds in which data moved, as far as this process has seen it."""
        return 0.0 if self.agreed is None else self.done - self.agreed

    @property
    def bytes(self) -> int:
        """Of this rank's tensors."""
        return sum(call.bytes for call in self.calls)

    @property
    def exposed(self) -> bool:
        """Whether the program waited for it here and now."""
        return not self.calls[0].overlapped


@dataclass(slots=True)
class Exchange:
    """One call, on all ranks of which there is a part."""

    number: Number
    shares: list[RankExchange] = field(default_factory=list)

    @property
    def last(self) -> RankExchange:
        """Of the rank that came last."""
        return min(self.shares, key=lambda share: share.wait)

    @property
    def late_by(self) -> float:
        """Seconds that the others have waited longer, in the middle."""
        waits = sorted(share.wait for share in self.shares)
        return waits[len(waits) // 2] - waits[0] if len(waits) > 1 else 0.0


def together(parts: Sequence[ProfilePart], base: CommonClock) -> list[Exchange]:
    """All exchanges, in the order in which the first rank came to them."""
    found: dict[Number, Exchange] = {}
    for part in parts:
        shares: dict[Number, list[RecordedCall]] = {}
        for call in part.calls:
            number = (call.epoch, call.set, call.lane, call.seq)
            shares.setdefault(number, []).append(call)
        for number, calls in shares.items():
            exchange = found.setdefault(number, Exchange(number))
            exchange.shares.append(_share(part, calls, base))
    return sorted(found.values(), key=lambda e: min(s.entered for s in e.shares))


def _share(
    part: ProfilePart, calls: list[RecordedCall], base: CommonClock
) -> RankExchange:
    agreed = calls[-1].agreed
    return RankExchange(
        part,
        calls,
        base.seconds(part, max(call.entered for call in calls)),
        None if agreed is None else base.seconds(part, agreed),
        base.seconds(part, max(call.done for call in calls)),
    )


def kind(call: RecordedCall) -> CallKind:
    """What calls of two steps have in common."""
    return (call.lane, call.op, call.name, call.bytes, call.set)


def boundaries(part: ProfilePart, base: CommonClock) -> list[float]:
    """The ends of steps: as the program has marked them, else where calls repeat."""
    if part.marks:
        return [base.seconds(part, when) for when in part.marks]
    agreed = [call for call in part.calls if call.agreed is not None]
    key = find_step_marker(Counter(map(kind, agreed)))
    ends = [call.done for call in agreed if kind(call) == key]
    return [base.seconds(part, when) for when in ends]


def covered(spans: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Seconds between `start` and `end` in which at least one span is.

    Example:
        >>> covered([(0.0, 2.0), (1.0, 3.0), (8.0, 20.0)], 0.5, 10.0)
        4.5
    """
    seconds, reached = 0.0, start
    for first, last in sorted(spans):
        first, last = max(first, reached), min(last, end)
        if last > first:
            seconds += last - first
            reached = last
    return seconds


def as_mapping(call: RecordedCall) -> Mapping[str, Any]:
    """What viewers show of a call beside its times."""
    shown = {"op": call.op, "seq": call.seq, "epoch": call.epoch, "bytes": call.bytes}
    if call.set:
        shown["process_set"] = call.set
    if call.algorithm:
        shown["algorithm"] = call.algorithm
    if call.code:
        shown["failed"] = call.code
    return shown
