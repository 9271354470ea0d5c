"""Shares: which place computes which pieces, computed alike on all ranks.

The functions and `Shares` depend only on values that all ranks have exchanged, and use
only integers, so all ranks compute equal tables without further communication. The
result of a step does not depend on the shares, only its duration does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

# A new table replaces the current one only if it should save more than a tenth of the
# time. Otherwise the noise of the measurements would move pieces in every step.
_TENTHS = 9
# A place without pieces is not measured. Its old time shrinks by 1/64 in every step, so
# that a place that was slow for a while gets a piece again after some hundred steps.
_DECAY = 64
MAX_MICROSECONDS = 2**30 // 4  # keeps the products and sums below far from 2**63


def even_counts(pieces: int, present: Sequence[int]) -> list[int]:
    """Returns the number of pieces of each place if all present places get alike.

    Example:
        >>> even_counts(5, [True, False, True])
        [3, 0, 2]
    """
    return balanced_counts(pieces, [1 if here else 0 for here in present])


def balanced_counts(pieces: int, microseconds: Sequence[int]) -> list[int]:
    """Returns the number of pieces of each place such that all finish together.

    Args:
        pieces: the number of pieces of a step.
        microseconds: the time of one piece at each place; 0 excludes the place.

    Example:
        >>> balanced_counts(12, [100, 100, 400])
        [6, 5, 1]
    """
    counts = [0] * len(microseconds)
    finish = [(time, place) for place, time in enumerate(microseconds) if time]
    heapq.heapify(finish)
    for _ in range(pieces):
        end, place = finish[0]
        counts[place] += 1
        heapq.heapreplace(finish, (end + microseconds[place], place))
    return counts


def pieces_of(place: int, counts: Sequence[int]) -> list[int]:
    """Returns the pieces of a place: consecutive blocks in the order of the places.

    Example:
        >>> pieces_of(1, [2, 3, 1])
        [2, 3, 4]
    """
    first = sum(counts[:place])
    return list(range(first, first + counts[place]))


def share_of_missing(
    missing: Sequence[int], present: Sequence[int], place: int
) -> list[int]:
    """Returns which of the missing pieces a present place computes.

    Example:
        >>> share_of_missing([2, 5, 8], [True, False, True], 2)
        [5]
    """
    here = [number for number, is_here in enumerate(present) if is_here]
    return list(missing[here.index(place) :: len(here)])


class Shares:
    """The table of pieces, which follows the measured speed of each place.

    Args:
        pieces: the number of pieces of a step.
        places: the number of places; at first all places get alike.

    Example:
        >>> shares = Shares(12, 2)
        >>> shares.counts
        [6, 6]
        >>> shares.update([True, True], [100, 200])
        >>> shares.counts
        [8, 4]
    """

    def __init__(self, pieces: int, places: int) -> None:
        self._pieces = pieces
        self._present = [1] * places
        self._microseconds = [0] * places
        self.counts = even_counts(pieces, self._present)

    def update(self, present: Sequence[int], measured: Sequence[int]) -> None:
        """Adapts the table to the exchanged times of one step.

        Args:
            present: for each place, whether its rank took part in the last exchange.
            measured: microseconds of a piece at each place; 0 if there is no new time.
        """
        lost = list(present) != self._present
        if not (lost or any(measured)) and all(self.counts):
            return  # nothing is new, and no old time has to shrink
        self._measure(measured)
        self._present = list(present)
        known = [t for t, here in zip(self._microseconds, present, strict=True) if here]
        if not all(known):
            # Some place has no time yet, so equal shares are the best guess.
            if lost:
                self.counts = even_counts(self._pieces, present)
            return
        times = [
            t if here else 0
            for t, here in zip(self._microseconds, present, strict=True)
        ]
        better = balanced_counts(self._pieces, times)
        now, then = self._duration(self.counts), self._duration(better)
        if lost or then * 10 < now * _TENTHS:
            self.counts = better

    def _measure(self, measured: Sequence[int]) -> None:
        for place, new in enumerate(measured):
            old = self._microseconds[place]
            if new:
                # One time much longer than before is more often a pause than a slower
                # rank, which a few steps show as well.
                self._microseconds[place] = (
                    (old + min(new, 2 * old)) // 2 if old else new
                )
            elif old and not self.counts[place]:
                self._microseconds[place] = max(old - old // _DECAY - 1, 1)

    def _duration(self, counts: Sequence[int]) -> int:
        return max(
            count * time for count, time in zip(counts, self._microseconds, strict=True)
        )
