"""One time base for all parts: seconds since the profile began, on one rank's clock.

Processes whose clock is the same one need nothing. Others have asked rank 0, again
and again, what its clock shows. Of some seconds the answer with the shortest way
counts, and between two of these clocks are taken to drift evenly; the error is half of
that way.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable
from functools import partial
from operator import add

from ringjax.profile.parts import ProfilePart

SPAN = 10.0  # seconds
ENDS = 1.0  # at both ends many questions are asked at once


class ClockOffset:
    """How far another clock is ahead of one, over time.

    Args:
        readings: (when, ahead, trip), in seconds of the one clock.

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
            place = 0 if when <= first else -1 if when > last else 1 + int(when / SPAN)
            if place not in best or trip < best[place][2]:
                best[place] = reading
        self._all = sorted(best.values())
        self._whens = [when for when, _, _ in self._all]
        self.error = max(trip for _, _, trip in self._all) / 2

    def ahead(self, when: float) -> float:
        """At that moment; beyond the first and the last reading as there."""
        at = bisect(self._whens, when)
        if at in (0, len(self._all)):
            return self._all[max(at - 1, 0)][1]
        (before, low, _), (after, high, _) = self._all[at - 1], self._all[at]
        return low + (high - low) * (when - before) / (after - before)


class CommonClock:
    """Of some parts.

    Attributes:
        error: seconds by which times of two ranks may be wrong at most; None: unknown,
            for some clocks only the wall clocks could be compared.
    """

    def __init__(self, parts: list[ProfilePart]) -> None:
        first = min(parts, key=lambda p: (p.members[0].epoch, p.members[0].rank))
        self._to_first: dict[str, Callable[[float], float]] = {first.clock: float}
        self.error: float | None = 0.0
        errors = {first.clock: 0.0}
        edges = _edges(parts)
        waiting = [first.clock]
        while waiting:
            known = waiting.pop(0)
            for (asker, asked), offset in edges.items():
                if asked == known and asker not in self._to_first:
                    self._add(asker, offset, known)
                    errors[asker] = errors[known] + offset.error
                    waiting.append(asker)
        for part in parts:
            if part.clock not in self._to_first:
                walls = (part.realtime - part.monotonic) - (
                    first.realtime - first.monotonic
                )
                self._to_first[part.clock] = partial(add, walls)
                self.error = None
        if self.error is not None:
            self.error = max(errors.values())
        self.zero = min(self._to_first[part.clock](part.began) for part in parts)

    def _add(self, clock: str, offset: ClockOffset, known: str) -> None:
        further = self._to_first[known]
        self._to_first[clock] = lambda when: further(when + offset.ahead(when))

    def seconds(self, part: ProfilePart, when: float) -> float:
        """On the time base, of a moment on the clock of that part."""
        return self._to_first[part.clock](when) - self.zero


def _edges(parts: list[ProfilePart]) -> dict[tuple[str, str], ClockOffset]:
    clocks = {(m.epoch, m.rank): p.clock for p in parts for m in p.members}
    readings: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for part in parts:
        for one in part.readings:
            asked = clocks.get((one.epoch, one.rank))
            if asked is not None and asked != part.clock:
                readings.setdefault((part.clock, asked), []).append(
                    (one.when, one.ahead, one.trip)
                )
    return {pair: ClockOffset(found) for pair, found in readings.items()}
