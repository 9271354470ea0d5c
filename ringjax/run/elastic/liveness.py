"""Whether a process still answers: one question at a time, and patience on our clock.

Only time in which we ran ourselves counts as silence: a machine that stood still for a
while, or a launcher that did, says nothing about the other process. Asks nobody itself.
"""

from __future__ import annotations

_BETWEEN = 1.0  # seconds from an answer to the next question
_STEP = 0.5  # the most seconds that count between two looks at the clock
_STARTING = 60.0  # seconds for a process to start that has never answered


class LivenessProbe:
    """The pulse of one process.

    Args:
        limit: seconds without an answer until it counts as hung.

    Example:
        >>> pulse = LivenessProbe(5.0)
        >>> pulse.asks(now=0.0), pulse.asks(now=0.4)
        (True, False)
        >>> pulse.answered(now=0.5)
        >>> pulse.hung
        False
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._silence: float | None = None  # since we asked; None: nothing is open
        self._looked = self._next = float("-inf")
        self._patience = max(limit, _STARTING)

    def asks(self, now: float) -> bool:
        """A look at the clock; whether to ask now."""
        passed = min(now - self._looked, _STEP)
        self._looked = now
        if self._silence is not None:
            self._silence += passed
            return False
        if now < self._next:
            return False
        self._silence = 0.0
        return True

    def answered(self, now: float) -> None:
        """An answer has come."""
        self._silence, self._next = None, now + _BETWEEN
        self._patience = self._limit

    @property
    def hung(self) -> bool:
        """Whether it has not answered for too long."""
        return self._silence is not None and self._silence >= self._patience
