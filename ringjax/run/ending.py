"""How a job is brought to its end: a signal, some patience, a harder signal.

Only the timetable; who sends the signals to whom is in static_job.py and
elastic/job.py.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator

# (seconds to wait before, signal): None gives up on whoever is left.
Plan = tuple[tuple[float, int | None], ...]
AFTER_FAILURE: Plan = (
    (1.0, signal.SIGTERM),
    (2.0, signal.SIGKILL),
    (1.0, None),
)
AFTER_SIGINT: Plan = (
    (0.0, signal.SIGINT),
    (0.6, signal.SIGTERM),
    (0.5, signal.SIGKILL),
    (0.3, None),
)
AFTER_SIGTERM: Plan = ((0.0, signal.SIGTERM), (1.1, signal.SIGKILL), (0.3, None))
# Time to leave at a commit. Kubernetes and Slurm give 30 s, unless told otherwise.
TO_LEAVE: Plan = ((0.0, signal.SIGTERM), (25.0, signal.SIGKILL), (0.3, None))
AT_ONCE: Plan = ((0.0, signal.SIGKILL), (0.2, None))


class Ending:
    """The plan of a job's end, once there is one.

    Args:
        after_sigterm: the plan when somebody asks for the end by SIGTERM.

    Attributes:
        signalled: the signal that ended ringrun, None if it was something else.
        stopping: whether the ranks have been told to end.
        given_up: whether the plan is through, whoever is left.
    """

    def __init__(self, after_sigterm: Plan = AFTER_SIGTERM) -> None:
        self._after_sigterm = after_sigterm
        self._plan: deque[tuple[float, int | None]] = deque()
        self._next = 0.0
        self.signalled: int | None = None
        self.stopping = False
        self.given_up = False

    @property
    def begun(self) -> bool:
        """Whether there is a plan."""
        return bool(self._plan) or self.given_up

    def begin(self, plan: Plan, wait: float | None = None) -> None:
        """Begin to end the job; `wait` instead of the plan's first pause."""
        self._plan = deque(plan)
        self._next = time.monotonic() + (plan[0][0] if wait is None else wait)

    def interrupt(self, number: int) -> None:
        """End the job because ringrun got a signal; a second one ends it at once."""
        again = self.signalled is not None
        self.signalled = self.signalled or number
        if again:
            self.begin(AT_ONCE)
        else:
            plans = {signal.SIGINT: AFTER_SIGINT, signal.SIGTERM: self._after_sigterm}
            self.begin(plans.get(signal.Signals(number), AFTER_SIGTERM))

    @property
    def patience(self) -> float | None:
        """Seconds that the ranks have to end, None if nobody has told them to."""
        left = sum(seconds for seconds, _ in self._plan)
        return left if self.stopping else None

    def timeout(self, longest: float) -> float:
        """Seconds until `due` has something, at most `longest`."""
        if not self._plan:
            return longest
        return min(longest, max(0.0, self._next - time.monotonic()))

    def due(self) -> Iterator[int]:
        """The signals to send now."""
        while self._plan and time.monotonic() >= self._next:
            number = self._plan.popleft()[1]
            if self._plan:
                self._next = time.monotonic() + self._plan[0][0]
            if number is None:
                self.given_up = True
                return
            self.stopping = True
            yield int(number)
