"""Blacklist of hosts on which workers have failed: no worker starts on them for a time.

The rules are Horovod's. Without a range of seconds a host stays on the list forever.
With a range MIN to MAX it stays for MIN seconds the first time, then twice as long each
time, at most MAX. A random part is added, so that hosts do not return all at the same
time. The caller passes the time.
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
    announced: bool = True


class Blacklist:
    """The hosts that must not get a new worker, each for some time.

    Args:
        cooldown: least and most seconds on the list; None means forever.
        draw: returns a random number from 0 to 1.

    Example:
        >>> blacklist = Blacklist((10.0, 60.0), draw=lambda: 0.0)
        >>> [blacklist.record_failure("a", now=now) for now in (0.0, 100.0)]
        [10.0, 20.0]
        >>> blacklist.blocks("a", now=119.0), blacklist.blocks("a", now=120.0)
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

    def record_failure(self, host: str, now: float) -> float:
        """Puts a host on the list because a worker failed there.

        A broken host takes all of its workers with it. Failures of a host that is on
        the list do not count, so the failures of these workers count once.

        Returns:
            Seconds until the host may be used again; infinity means never.
        """
        record = self._records.setdefault(host, _Record())
        if record.until > now:
            return record.until - now
        record.announced = False
        if self._cooldown is None:
            record.until = math.inf
            return math.inf
        least, most = self._cooldown
        # The host worked well for a long time: use the shortest cooldown again.
        if now - record.until > 2 * most:
            record.times = 0
        seconds = least * 2.0 ** min(record.times, 60)
        seconds = min(most, max(least, seconds + least * self._draw()))
        record.times += 1
        record.until = now + seconds
        return seconds

    def blocks(self, host: str, now: float) -> bool:
        """Returns whether no worker may start on the host now."""
        record = self._records.get(host)
        return record is not None and record.until > now

    def take_announcement(self, host: str, now: float) -> float | None:
        """Returns the seconds of a new entry, once for each entry, or None."""
        record = self._records.get(host)
        if record is None or record.announced:
            return None
        record.announced = True
        return record.until - now
