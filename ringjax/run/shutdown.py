"""Shutdown of a job: handles the signals to ringrun, and sends signals to ranks."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType

# (seconds to wait, signal to send then). At the signal None ringrun stops waiting.
Plan = tuple[tuple[float, int | None], ...]
AFTER_FAILURE: Plan = ((1.0, signal.SIGTERM), (2.0, signal.SIGKILL), (1.0, None))
AFTER_SIGINT: Plan = (
    (0.0, signal.SIGINT),
    (0.6, signal.SIGTERM),
    (0.5, signal.SIGKILL),
    (0.3, None),
)
AFTER_SIGTERM: Plan = ((0.0, signal.SIGTERM), (1.1, signal.SIGKILL), (0.3, None))
# Ranks have 25 s to reach a commit, because Kubernetes sends SIGKILL 30 s after SIGTERM
# by default, and so does Slurm.
TO_LEAVE: Plan = ((0.0, signal.SIGTERM), (25.0, signal.SIGKILL), (0.3, None))
AT_ONCE: Plan = ((0.0, signal.SIGKILL), (0.2, None))

_LOOP_TIMEOUT = 0.5  # seconds until ringrun's loop must have handled a signal


class Shutdown:
    """The shutdown of a job, which sends the signals of a `Plan` one after another.

    Attributes:
        signalled: the first signal that made ringrun end the job, or None. stopping:
        whether ringrun has sent the first signal of the plan. given_up: whether the
        plan is finished, even if some ranks still run.
    """

    def __init__(self, after_sigterm: Plan = AFTER_SIGTERM) -> None:
        self._after_sigterm = after_sigterm
        self._plan: deque[tuple[float, int | None]] = deque()
        self._next = 0.0
        self.signalled: int | None = None
        self.stopping = False
        self.given_up = False

    @property
    def started(self) -> bool:
        return bool(self._plan) or self.given_up

    def start(self, plan: Plan, wait: float | None = None) -> None:
        """Starts to end the job. `wait` replaces the plan's first waiting time."""
        self._plan = deque(plan)
        self._next = time.monotonic() + (plan[0][0] if wait is None else wait)

    def interrupt(self, number: int) -> None:
        """Ends the job because of a signal. A second signal kills the ranks."""
        again = self.signalled is not None
        self.signalled = self.signalled or number
        if again:
            self.start(AT_ONCE)
        else:
            plans = {signal.SIGINT: AFTER_SIGINT, signal.SIGTERM: self._after_sigterm}
            self.start(plans.get(signal.Signals(number), AFTER_SIGTERM))

    @property
    def time_left(self) -> float | None:
        """Seconds until ringrun stops waiting, or None before the first signal."""
        left = sum(seconds for seconds, _ in self._plan)
        return left if self.stopping else None

    def timeout(self, longest: float) -> float:
        """Returns seconds until the next signal is due, but at most `longest`."""
        if not self._plan:
            return longest
        return min(longest, max(0.0, self._next - time.monotonic()))

    def due_signals(self) -> Iterator[int]:
        while self._plan and time.monotonic() >= self._next:
            number = self._plan.popleft()[1]
            if self._plan:
                self._next = time.monotonic() + self._plan[0][0]
            if number is None:
                self.given_up = True
                return
            self.stopping = True
            yield int(number)


class ShutdownSignals:
    """The handlers of signals that are sent to ringrun.

    SIGINT, SIGTERM and SIGHUP end the job, and a second such signal kills the ranks.
    After SIGTERM an elastic job may continue without ringrun: see `Job.detach`. SIGUSR1
    calls `forward`.
    """

    def __init__(
        self,
        shutdown: Shutdown,
        forward: Callable[[int], None],
        detach: Callable[[], bool],
    ) -> None:
        self._shutdown, self._forward, self._detach = shutdown, forward, detach
        self._first: int | None = None
        self._late = False

    def install(self) -> None:
        """Installs the handlers, and unblocks all signals."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup makes ringrun ignore SIGHUP, and a shell makes background jobs of a
            # script ignore SIGINT. Continue to ignore these signals.
            ignored = signal.getsignal(number) == signal.SIG_IGN
            if number == signal.SIGTERM or not ignored:
                signal.signal(number, self._handle)
        signal.signal(signal.SIGUSR1, lambda number, frame: self._forward(number))
        signal.signal(signal.SIGALRM, self._expire)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def ignore_alarm(self) -> None:
        """Ignores the alarm that may be pending, because the job is over already."""
        signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and not self._first and self._detach():
            return
        self._late = self._first is not None
        self._first = self._first or number
        self._shutdown.interrupt(number)
        signal.setitimer(signal.ITIMER_REAL, 0.4 if self._late else _LOOP_TIMEOUT)

    def _expire(self, number: int, frame: FrameType | None) -> None:
        """Exits if ringrun's loop does not react. Then the agents end the ranks.

        The loop may block while it writes to a terminal that nobody reads.
        """
        time_left = self._shutdown.time_left
        if self._late or time_left is None:
            os._exit(128 + (self._first or number))
        self._late = True
        signal.setitimer(signal.ITIMER_REAL, time_left or _LOOP_TIMEOUT)
