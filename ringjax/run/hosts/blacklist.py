"""Hosts whose workers failed: for how long nothing is started on them.

As in Horovod: for good, or with a range of seconds for MIN the first time, twice as
long each further time, at most MAX, plus some chance so that hosts do not come back all
at once. Pure bookkeeping; the clock is the caller's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Record:
    times: int = 0
    until: float = -math.inf
    told: bool = True


class Blacklist:
    """What is held against hosts.

    Args:
        cooldown: least and most seconds on the list; None: for good.
        draw: a random number from 0 to 1.

    Example:
        >>> blacklist = Blacklist((10.0, 60.0), draw=lambda: 0.0)
        >>> blacklist.failed("a", now=0.0), blacklist.failed("a", now=100.0)
        (10.0, 20.0)
        >>> blacklist.holds("a", now=119.0), blacklist.holds("a", now=120.0)
        (True, False)
    """

    def __init__(
        self,
        cooldown: tuple[float, float] | None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._cooldown = cooldown
        self._draw = draw
        self._records: dict[str, _Record] = {}

    def failed(self, host: str, now: float) -> float:
        """A worker failed there: seconds until the host is used again, or infinity.

        Workers that fail while the host is on the list, as all do that a broken host
        takes with it, count once.
        """
        record = self._records.setdefault(host, _Record())
        if record.until > now:
            return record.until - now
        record.told = False
        if self._cooldown is None:
            record.until = math.inf
            return math.inf
        least, most = self._cooldown
        if now - record.until > 2 * most:  # it did well for long
            record.times = 0
        seconds = least * 2.0 ** min(record.times, 60)
        seconds = min(most, max(least, seconds + least * self._draw()))
        record.times += 1
        record.until = now + seconds
        return seconds

    def holds(self, host: str, now: float) -> bool:
        """Whether nothing may be started there now."""
        record = self._records.get(host)
        return record is not None and record.until > now

    def news(self, host: str, now: float) -> float | None:
        """Seconds that a host has just got, to be told once; None: nothing new."""
        record = self._records.get(host)
        if record is None or record.told:
            return None
        record.told = True
        return record.until - now
