"""Whom all wait for: judged from how long each rank has waited, without any clock.

In a call of all ranks, whoever waits least has come last, and the others have waited
for it. One such call says nothing; a rank that is the last in most calls, and costs the
others a share of their time that is worth a sentence, is named.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

# (of the named lane, sequence number, microseconds waited)
Waited = tuple[bool, int, int]

MOST_OPEN = 8192  # calls that some ranks have not told about yet
LAST_IN = 0.5  # of the calls, from where on a rank is suspected
COSTS = 0.02  # of the time, likewise
FEWEST = 8  # calls, to say anything about


@dataclass
class Lateness:
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


class Stragglers:
    """Judges the calls of one interval.

    Args:
        size: ranks of the world.

    Example:
        >>> seen = Stragglers(2)
        >>> for call in range(10):
        ...     seen.hear(0, [(False, call, 5000)])
        ...     seen.hear(1, [(False, call, 10)])
        >>> seen.culprit(elapsed=0.1)
        1
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = 0
        self.late = [Lateness() for _ in range(size)]
        self._open: OrderedDict[tuple[bool, int], dict[int, int]] = OrderedDict()

    def hear(self, rank: int, waits: Iterable[Waited]) -> None:
        """What one rank tells of its waits; of one call the least counts."""
        for named, sequence, us in waits:
            told = self._open.setdefault((named, sequence), {})
            told[rank] = min(us, told.get(rank, us))
        # Judged late, so that all operations of a call have been told.
        full = [key for key, told in self._open.items() if len(told) == self.size]
        for key in full:
            self._judge(self._open.pop(key))
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)

    def _judge(self, told: dict[int, int]) -> None:
        last = min(told, key=lambda rank: (told[rank], rank))
        others = sorted(us for rank, us in told.items() if rank != last)
        self.calls += 1
        self.late[last].times += 1
        if others:
            behind = others[len(others) // 2] - told[last]
            self.late[last].seconds.append(behind * 1e-6)

    def culprit(self, elapsed: float) -> int | None:
        """The rank that all wait for, if there is one.

        Args:
            elapsed: seconds in which these calls were made.
        """
        if self.calls < FEWEST or elapsed <= 0:
            return None
        rank = max(range(self.size), key=lambda r: self.late[r].lost)
        late = self.late[rank]
        often = late.times >= LAST_IN * self.calls
        return rank if often and late.lost >= COSTS * elapsed else None

    def begin_anew(self) -> None:
        """The next interval; what is half told stays."""
        self.calls = 0
        self.late = [Lateness() for _ in range(self.size)]
