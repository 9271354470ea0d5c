"""Waits for actions of other threads or processes.

No test expects that something is fast, because machines differ and may be busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds, less than a test's limit of 60 s. So the wait fails before the test, and its
# error names the condition.
LONG = 40.0


def until(condition: Callable[[], object], seconds: float = LONG) -> None:
    """Waits until the condition is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
