"""Whether a process still answers: one question at a time, and patience on our clock.

Only time in which we ran ourselves counts as silence: a machine that stood still for a
while, or a launcher that did, says nothing about the other process. Asks nobody itself.
"""

from __future__ import annotations

_INTERVAL = 1.0  # seconds from an answer to the next question
_MAX_STEP = 0.5  # the most seconds that count between two looks at the clock
_START_TIMEOUT = 60.0  # seconds for a process to start that has never record_answer


class LivenessProbe:
    """The probe of one process.

    Args:
        limit: seconds without an answer until it counts as hung.

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
        self._silence: float | None = None  # since we asked; None: nothing is open
        self._last_tick = self._next_question = float("-inf")
        self._allowed = max(limit, _START_TIMEOUT)

    def should_ask(self, now: float) -> bool:
        """A look at the clock; whether to ask now."""
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
        """An answer has come."""
        self._silence, self._next_question = None, now + _INTERVAL
        self._allowed = self._limit

    @property
    def hung(self) -> bool:
        """Whether it has not record_answer for too long."""
        return self._silence is not None and self._silence >= self._allowed
