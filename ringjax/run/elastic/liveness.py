"""Liveness probe: decides whether another process still replies.

At most one question waits for its reply. Only time in which this process runs counts as
silence: if the machine was suspended, or this process was stopped, the pause says
nothing about the other process. The caller sends the questions.
"""

from __future__ import annotations

_INTERVAL = 1.0  # seconds between a reply and the next question
_MAX_STEP = 0.5  # the most seconds of silence that one call of `should_ask` adds
# Seconds until the first reply must arrive, while the process starts.
_START_TIMEOUT = 60.0


class LivenessProbe:
    """The questions to one process, and the replies of the process.

    Args:
        limit: seconds without a reply until the process counts as hung.

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
        # Seconds since the question that has no reply; None if all have.
        self._silence: float | None = None
        self._last_tick = self._next_question = float("-inf")
        self._allowed = max(limit, _START_TIMEOUT)

    def should_ask(self, now: float) -> bool:
        """Adds the time since the last call; returns whether to send a question now."""
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
        """Whether the process has not replied for too long."""
        return self._silence is not None and self._silence >= self._allowed
