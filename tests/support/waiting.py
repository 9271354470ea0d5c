"""Waits for actions of other threads or processes.

No test requires that an action is fast, because machines differ and may be busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds to wait. This is less than the timeout of a test, 60 s, so the wait fails
# first, and its stack shows the condition.
LONG = 40.0


def until(condition: Callable[[], object], seconds: float = LONG) -> None:
    """Waits until the condition is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
