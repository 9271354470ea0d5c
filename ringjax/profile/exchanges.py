"""Matches the recorded calls of all ranks: an exchange is one call on all its ranks.

The rank that waited least in an exchange came last. Each rank has measured its waiting
time on its own clock, so errors between clocks do not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ringjax.profile.clocks import CommonClock
from ringjax.profile.parts import ProfilePart, RecordedCall
from ringjax.world.step_counter import CallKind, find_step_marker

# The epoch, the process set, the lane and the sequence number of a call.
CallId = tuple[int, int, str, int]


@dataclass(slots=True)
class RankExchange:
    """The times of one rank in an exchange, in seconds on the common clock.

    Attributes:
        calls: the call, or the named operations that were executed in one call.
        entered: when the rank entered the call; for several operations, when the rank
            submitted the last operation.
        agreed: when all ranks had entered the call; None if some rank never entered.
        done: when the call was done.
    """

    part: ProfilePart
    calls: list[RecordedCall]
    entered: float
    agreed: float | None
    done: float

    @property
    def wait(self) -> float:
        """The seconds from `entered` until all ranks had entered the call."""
        return (self.done if self.agreed is None else self.agreed) - self.entered

    @property
    def move(self) -> float:
        """The seconds of moving data; on a device, of enqueueing the operation."""
        return 0.0 if self.agreed is None else self.done - self.agreed

    @property
    def bytes(self) -> int:
        return sum(call.bytes for call in self.calls)

    @property
    def exposed(self) -> bool:
        """Whether the program waited for the call, instead of continuing meanwhile."""
        return not self.calls[0].overlapped


@dataclass(slots=True)
class Exchange:
    """One call on all ranks that have recorded a profile."""

    call_id: CallId
    ranks: list[RankExchange] = field(default_factory=list)

    @property
    def last(self) -> RankExchange:
        """The rank that entered the call last."""
        return min(self.ranks, key=lambda rank: rank.wait)

    @property
    def late_by(self) -> float:
        """The seconds by which the last rank entered later than the median rank."""
        waits = sorted(rank.wait for rank in self.ranks)
        return waits[len(waits) // 2] - waits[0] if len(waits) > 1 else 0.0


def match_calls(parts: Sequence[ProfilePart], clock: CommonClock) -> list[Exchange]:
    """Returns all exchanges, ordered by the time when the first rank entered."""
    found: dict[CallId, Exchange] = {}
    messages: list[Exchange] = []
    for part in parts:
        by_id: dict[CallId, list[RecordedCall]] = {}
        for call in part.calls:
            call_id = (call.epoch, call.set, call.lane, call.seq)
            if call.seq:
                by_id.setdefault(call_id, []).append(call)
            else:  # messages between pairs of ranks are no call of all ranks
                one = _rank_exchange(part, [call], clock)
                messages.append(Exchange(call_id, [one]))
        for call_id, calls in by_id.items():
            exchange = found.setdefault(call_id, Exchange(call_id))
            exchange.ranks.append(_rank_exchange(part, calls, clock))
    every = [*found.values(), *messages]
    return sorted(every, key=lambda e: min(r.entered for r in e.ranks))


def _rank_exchange(
    part: ProfilePart, calls: list[RecordedCall], clock: CommonClock
) -> RankExchange:
    agreed = calls[-1].agreed
    return RankExchange(
        part,
        calls,
        clock.seconds(part, max(call.entered for call in calls)),
        None if agreed is None else clock.seconds(part, agreed),
        clock.seconds(part, max(call.done for call in calls)),
    )


def _call_kind(call: RecordedCall) -> CallKind:
    return (call.lane, call.op, call.name, call.bytes, call.set)


def step_ends(part: ProfilePart, clock: CommonClock) -> list[float]:
    """Returns the ends of training steps, in seconds on the common clock.

    If the program has marked no ends, a step ends with each call of the kind that
    `find_step_marker` finds.
    """
    if part.marks:
        return [clock.seconds(part, when) for when in part.marks]
    agreed = [call for call in part.calls if call.agreed is not None]
    marker = find_step_marker(Counter(map(_call_kind, agreed)))
    ends = [call.done for call in agreed if _call_kind(call) == marker]
    return [clock.seconds(part, when) for when in ends]


def covered_seconds(
    spans: Iterable[tuple[float, float]], start: float, end: float
) -> float:
    """Returns the seconds within [start, end] that at least one span covers.

    Example:
        >>> covered_seconds([(0.0, 2.0), (1.0, 3.0), (8.0, 20.0)], 0.5, 10.0)
        4.5
    """
    seconds, reached = 0.0, start
    for first, last in sorted(spans):
        first, last = max(first, reached), min(last, end)
        if last > first:
            seconds += last - first
            reached = last
    return seconds


def call_details(call: RecordedCall) -> dict[str, str | int]:
    """Returns the attributes of a call that viewers show next to its times."""
    shown: dict[str, str | int] = {
        "op": call.op,
        "seq": call.seq,
        "epoch": call.epoch,
        "bytes": call.bytes,
    }
    if call.set:
        shown["process_set"] = call.set
    if call.algorithm:
        shown["algorithm"] = call.algorithm
    if call.code:
        shown["failed"] = call.code
    return shown
