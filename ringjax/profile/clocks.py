"""Converts the times that all ranks have recorded to seconds on one common clock.

Processes on one host share a clock. Processes on other hosts have repeatedly requested
the time of rank 0's clock. In each interval of SPAN seconds, only the reply with the
shortest round trip is used. Between two of these replies, the clocks are assumed to
drift linearly. The error is half of the round trip (Cristian, Probabilistic clock
synchronization, Distributed Computing 3, 1989).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable
from functools import partial
from operator import add

from ringjax.profile.parts import ProfilePart

SPAN = 10.0  # seconds of an interval, of which only the best reading is used
ENDS = 1.0  # seconds of the first and the last interval, which have many readings


class ClockOffset:
    """How many seconds another clock is ahead of this clock, as a function of time.

    Computed from readings (when, ahead, round trip), in seconds of this clock.

    Example:
        >>> offset = ClockOffset([(0.0, 5.0, 0.2), (60.0, 5.6, 0.1), (60.5, 9.0, 8.0)])
        >>> round(offset.ahead(30.0), 3), offset.error
        (5.3, 0.1)
    """

    def __init__(self, readings: Iterable[tuple[float, float, float]]) -> None:
        ordered = sorted(readings)
        first, last = ordered[0][0] + ENDS, ordered[-1][0] - ENDS
        best: dict[int, tuple[float, float, float]] = {}
        for reading in ordered:
            when, _, trip = reading
            span = 0 if when <= first else -1 if when > last else 1 + int(when / SPAN)
            if span not in best or trip < best[span][2]:
                best[span] = reading
        self._readings = sorted(best.values())
        self._whens = [when for when, _, _ in self._readings]
        self.error = max(trip for _, _, trip in self._readings) / 2

    def ahead(self, when: float) -> float:
        """Returns the offset at `when`: interpolated, constant outside of readings."""
        at = bisect(self._whens, when)
        if at in (0, len(self._readings)):
            return self._readings[max(at - 1, 0)][1]
        (before, low, _), (after, high, _) = self._readings[at - 1], self._readings[at]
        return low + (high - low) * (when - before) / (after - before)


class CommonClock:
    """Converts the times of all ranks to the clock of the first rank.

    Attributes:
        error: the largest error between two ranks, in seconds; None if unknown, because
            some clocks could only be compared by the time of day.
    """

    def __init__(self, parts: list[ProfilePart]) -> None:
        first = min(parts, key=lambda p: (p.members[0].epoch, p.members[0].rank))
        self._to_first: dict[str, Callable[[float], float]] = {first.clock: float}
        self.error: float | None = 0.0
        errors = {first.clock: 0.0}
        offsets = _offsets(parts)
        # Search breadth-first from the first rank. If the first rank was lost, ranks of
        # later epochs have read the clock of a new rank 0, and this rank, in an earlier
        # epoch, has read the clock of the first rank.
        reached = [first.clock]
        while reached:
            known = reached.pop(0)
            for (asker, asked), offset in offsets.items():
                if asked == known and asker not in self._to_first:
                    self._add(asker, offset, known)
                    errors[asker] = errors[known] + offset.error
                    reached.append(asker)
        for part in parts:
            if part.clock not in self._to_first:
                time_of_day = (part.realtime - part.monotonic) - (
                    first.realtime - first.monotonic
                )
                self._to_first[part.clock] = partial(add, time_of_day)
                self.error = None
        if self.error is not None:
            self.error = max(errors.values())
        self.zero = min(self._to_first[part.clock](part.began) for part in parts)

    def _add(self, clock: str, offset: ClockOffset, known: str) -> None:
        further = self._to_first[known]
        self._to_first[clock] = lambda when: further(when + offset.ahead(when))

    def seconds(self, part: ProfilePart, when: float) -> float:
        """Converts a time on the clock of `part` to seconds since the profile began."""
        return self._to_first[part.clock](when) - self.zero


def _offsets(parts: list[ProfilePart]) -> dict[tuple[str, str], ClockOffset]:
    """Returns the offsets by (clock of the requesting rank, clock of rank 0)."""
    clocks = {(m.epoch, m.rank): p.clock for p in parts for m in p.members}
    readings: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for part in parts:
        for reading in part.readings:
            asked = clocks.get((reading.epoch, reading.rank))
            if asked is not None and asked != part.clock:
                readings.setdefault((part.clock, asked), []).append(
                    (reading.when, reading.ahead, reading.trip)
                )
    return {pair: ClockOffset(found) for pair, found in readings.items()}
