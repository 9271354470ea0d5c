"""Liveness probe: decides whether another process still answers.

One question is open at a time. Only time in which this process runs counts as silence:
if the machine was suspended, or this process was stopped, the pause says nothing about
the other process. The caller sends the questions.
"""

from __future__ import annotations

_INTERVAL = 1.0  # seconds from an answer to the next question
_MAX_STEP = 0.5  # seconds between two calls of `should_ask` that count as silence
_START_TIMEOUT = 60.0  # seconds for the first answer, while the process starts


class LivenessProbe:
    """The questions to one process and its answers.

    Args:
        limit: seconds without an answer until the process counts as hung.

    Example:
        >>> probe = LivenessProbe(5.0)
        >>> probe.should_ask(now=0.0), probe.should_ask(now=0.4)
        (True, False)
        >>> probe.record_answer(now=0.5)
        >>> probe.hung
        False
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._silence: float | None = None  # since the question; None: none is open
        self._last_tick = self._next_question = float("-inf")
        self._allowed = max(limit, _START_TIMEOUT)

    def should_ask(self, now: float) -> bool:
        """Counts the time since the last call; returns whether to ask now."""
        passed = min(now - self._last_tick, _MAX_STEP)
        self._last_tick = now
        if self._silence is not None:
            self._silence += passed
            return False
        if now < self._next_question:
            return False
        self._silence = 0.0
        return True

    def record_answer(self, now: float) -> None:
        self._silence, self._next_question = None, now + _INTERVAL
        self._allowed = self._limit

    @property
    def hung(self) -> bool:
        """Whether the process has not answered for too long."""
        return self._silence is not None and self._silence >= self._allowed
