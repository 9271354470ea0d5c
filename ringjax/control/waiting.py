"""Waiting for one descriptor, whatever its number: `select.select` ends at 1,023."""

from __future__ import annotations

import math
import select
from typing import Protocol


class _HasFileno(Protocol):
    def fileno(self) -> int:
        """Its descriptor."""


def readable(what: int | _HasFileno, seconds: float | None = None) -> bool:
    """Whether there is something to read within that time; without one, waits."""
    return _wait(what, select.POLLIN, seconds)


def writable(what: int | _HasFileno, seconds: float | None = None) -> bool:
    """Whether something can be written within that time; without one, waits."""
    return _wait(what, select.POLLOUT, seconds)


def _wait(what: int | _HasFileno, event: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(what, event)
    return bool(poll.poll(None if seconds is None else math.ceil(1000 * seconds)))
