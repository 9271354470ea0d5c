"""Finds the rank for which all other ranks wait, from the waiting times of all ranks.

In a collective, the rank that waits least has come last, and the other ranks have
waited for that rank. So no clocks need to be compared. A rank is a straggler if it is
last in most calls or causes most of the waiting, and if it costs the other ranks a
relevant part of their time. To be last in most calls would be too strict as the only
criterion: a training step may have a hundred calls, and only in the first of these
calls do all ranks wait for a rank that computed for too long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

# A wait record: the lane of the call as an index of `LANES`, its sequence number, and
# the microseconds of the wait.
WaitRecord = tuple[int, int, int]
# The lanes: calls of compiled programs, named operations, and JAX's own collectives.
LANES = ("compiled", "named", "jax")

MAX_PENDING_CALLS = 8192  # most calls to remember that some ranks have not reported
_MIN_SHARE = 0.5  # a straggler's least share of last arrivals or of the waiting time
_MIN_SHARE_OF_TWO = 2 / 3  # this share in a job of two ranks, where 1/2 is usual
MIN_COST = 0.02  # a straggler's least cost, as a share of the other ranks' time
_MAX_OUTLIERS = 3  # the most expensive calls of each rank, which are ignored
MIN_CALLS = 8  # least number of calls before a rank can be a straggler


class LastArrival(NamedTuple):
    """The rank that came last in one call, and its delay in seconds."""

    last: int
    behind: float


class Stragglers:
    """Finds for each call which rank came last, from the wait records of all ranks.

    Args:
        size: the number of ranks of the world.

    Example:
        >>> seen = Stragglers(2)
        >>> seen.add_waits(0, [(0, 7, 5000)])
        []
        >>> seen.add_waits(1, [(0, 7, 10)])
        [LastArrival(last=1, behind=0.00499)]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pending: OrderedDict[tuple[int, int], dict[int, int]] = OrderedDict()

    def add_waits(self, rank: int, waits: Iterable[WaitRecord]) -> list[LastArrival]:
        """Adds wait records of one rank. Returns the last arrivals of complete calls.

        A call is complete when all ranks have reported it.
        """
        touched = {}
        for lane, sequence, us in waits:
            reported = self._pending.setdefault((lane, sequence), {})
            # Several named operations may share one call. The rank was ready when the
            # last operation was submitted, which is the operation that waited least.
            reported[rank] = min(us, reported.get(rank, us))
            touched[lane, sequence] = reported
        # Check for complete calls after the loop, so that all operations of a call are
        # included.
        full = [key for key, reported in touched.items() if len(reported) == self.size]
        arrivals = [_last_arrival(self._pending.pop(key)) for key in full]
        while len(self._pending) > MAX_PENDING_CALLS:
            self._pending.popitem(last=False)
        return arrivals


def _last_arrival(waits: dict[int, int]) -> LastArrival:
    last = min(waits, key=lambda rank: (waits[rank], rank))
    others = sorted(us for rank, us in waits.items() if rank != last)
    behind = others[len(others) // 2] - waits[last] if others else 0
    return LastArrival(last, behind * 1e-6)


class StragglerTally:
    """Counts in one interval how often each rank came last.

    Attributes:
        delays: for each rank, its delays in seconds in the calls in which it came last.

    Example:
        >>> tally = StragglerTally(2)
        >>> for call in range(10):
        ...     tally.add(LastArrival(1, 0.005))
        >>> tally.straggler(elapsed=0.1)
        1
    """

    def __init__(self, size: int) -> None:
        self.calls = 0
        self.delays: list[list[float]] = [[] for _ in range(size)]

    def add(self, arrival: LastArrival) -> None:
        self.calls += 1
        self.delays[arrival.last].append(arrival.behind)

    def typical_delay(self, rank: int) -> float:
        """Returns the median delay of a rank in seconds; 0 if it was never last."""
        ordered = sorted(self.delays[rank])
        return ordered[len(ordered) // 2] if ordered else 0.0

    def straggler(self, elapsed: float) -> int | None:
        """Returns the rank for which all other ranks wait, or None.

        `elapsed` is the time in seconds within which all calls were made.
        """
        if self.calls < MIN_CALLS or elapsed <= 0:
            return None
        costs = [sum(delays) for delays in self.delays]
        times = [float(len(delays)) for delays in self.delays]
        if (rank := self._worst(elapsed, costs, times)) is not None:
            return rank
        # A rank may be last in few calls, but very late in these calls. Ignore the
        # longest delays of each rank, because one or two delays make no straggler.
        costs = [sum(sorted(delays)[:-_MAX_OUTLIERS]) for delays in self.delays]
        return self._worst(elapsed, costs, costs)

    def _worst(
        self, elapsed: float, costs: list[float], shares: list[float]
    ) -> int | None:
        rank = max(range(len(costs)), key=lambda r: costs[r])
        least = _MIN_SHARE_OF_TWO if len(costs) == 2 else _MIN_SHARE
        most = shares[rank] >= least * sum(shares)
        return rank if most and costs[rank] >= MIN_COST * elapsed else None
