"""Whom all wait for: judged from how long each rank has waited, without any clock.

In a call of all ranks, whoever waits least has come last, and the others have waited
for it. One such call says nothing; a rank that is the last in most calls, or for which
most of the waiting is, and costs the others a share of their time that is worth a
sentence, is named. The latter because a step may be a hundred calls, and in the first
of them alone all wait for a rank that was slow before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

# (of the named lane, sequence number, microseconds waited)
WaitRecord = tuple[bool, int, int]

MAX_PENDING_CALLS = 8192  # calls that some ranks have not told about yet
LAST_IN = 0.5  # of the calls, from where on a rank is suspected
OF_TWO = 2 / 3  # likewise if there are two ranks, of which one always is the last
MIN_COST = 0.02  # of the time, likewise
ACCIDENTS = 3  # calls that cost most, of each rank
MIN_CALLS = 8  # calls, to say anything about


class LastArrival(NamedTuple):
    """Of one call: who came last, and how many seconds behind the others."""

    last: int
    behind: float


class Stragglers:
    """Brings together what ranks tell of the same calls.

    Args:
        size: ranks of the world.

    Example:
        >>> seen = Stragglers(2)
        >>> seen.add_waits(0, [(False, 7, 5000)])
        []
        >>> seen.add_waits(1, [(False, 7, 10)])
        [LastArrival(last=1, behind=0.00499)]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._open: OrderedDict[tuple[bool, int], dict[int, int]] = OrderedDict()

    def add_waits(self, rank: int, waits: Iterable[WaitRecord]) -> list[LastArrival]:
        """What one rank tells of its waits; of one call the least counts.

        Returns:
            The calls of which all ranks have told now.
        """
        touched = {}
        for named, sequence, us in waits:
            told = self._open.setdefault((named, sequence), {})
            told[rank] = min(us, told.get(rank, us))
            touched[named, sequence] = told
        # LastArrival late, so that all operations of a call have been told.
        full = [key for key, told in touched.items() if len(told) == self.size]
        judged = [_judge(self._open.pop(key)) for key in full]
        while len(self._open) > MAX_PENDING_CALLS:
            self._open.popitem(last=False)
        return judged


def _judge(told: dict[int, int]) -> LastArrival:
    last = min(told, key=lambda rank: (told[rank], rank))
    others = sorted(us for rank, us in told.items() if rank != last)
    behind = others[len(others) // 2] - told[last] if others else 0
    return LastArrival(last, behind * 1e-6)


@dataclass
class RankLateness:
    """Of one rank: in how many calls it came last, and how late it was in these."""

    times: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def lost(self) -> float:
        """Seconds that the others have waited for it, in all."""
        return sum(self.seconds)

    @property
    def typical(self) -> float:
        """The median, in seconds."""
        ordered = sorted(self.seconds)
        return ordered[len(ordered) // 2] if ordered else 0.0


class StragglerTally:
    """The judgements of one interval.

    Example:
        >>> seen = StragglerTally(2)
        >>> for call in range(10):
        ...     seen.add(LastArrival(1, 0.005))
        >>> seen.straggler(elapsed=0.1)
        1
    """

    def __init__(self, size: int) -> None:
        self.calls = 0
        self.late = [RankLateness() for _ in range(size)]

    def add(self, judged: LastArrival) -> None:
        """One more call."""
        self.calls += 1
        self.late[judged.last].times += 1
        self.late[judged.last].seconds.append(judged.behind)

    def straggler(self, elapsed: float) -> int | None:
        """The rank that all wait for, if there is one.

        Args:
            elapsed: seconds in which these calls were made.
        """
        if self.calls < MIN_CALLS or elapsed <= 0:
            return None
        costs = [late.lost for late in self.late]
        times = [float(late.times) for late in self.late]
        if (rank := self._worst(elapsed, costs, times)) is not None:
            return rank
        # Not because of an accident or two.
        costs = [sum(sorted(late.seconds)[:-ACCIDENTS]) for late in self.late]
        return self._worst(elapsed, costs, costs)

    def _worst(
        self, elapsed: float, costs: list[float], shares: list[float]
    ) -> int | None:
        rank = max(range(len(costs)), key=lambda r: costs[r])
        least = OF_TWO if len(costs) == 2 else LAST_IN
        most = shares[rank] >= least * sum(shares)
        return rank if most and costs[rank] >= MIN_COST * elapsed else None
