"""Waiting for what another thread or process does.

No test expects that something is quick: machines differ, and others may use this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds: no expectation, only less than the 60 that a test has, so that it is the wait
# that fails, and says for what it was.
LONG = 40.0


def until(condition: Callable[[], object], seconds: float = LONG) -> None:
    """Returns once it is true; fails after that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
