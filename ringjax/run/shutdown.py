"""Shutdown of a job: ringrun's own signals, and the plan of signals for the ranks."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

# Steps of (seconds to wait before the signal, signal). At None ringrun stops waiting.
Plan = tuple[tuple[float, int | None], ...]
AFTER_FAILURE: Plan = ((1.0, signal.SIGTERM), (2.0, signal.SIGKILL), (1.0, None))
AFTER_SIGINT: Plan = (
    (0.0, signal.SIGINT),
    (0.6, signal.SIGTERM),
    (0.5, signal.SIGKILL),
    (0.3, None),
)
AFTER_SIGTERM: Plan = ((0.0, signal.SIGTERM), (1.1, signal.SIGKILL), (0.3, None))
# Ranks get time to leave at a commit. Kubernetes and Slurm kill after 30 s by default.
TO_LEAVE: Plan = ((0.0, signal.SIGTERM), (25.0, signal.SIGKILL), (0.3, None))
AT_ONCE: Plan = ((0.0, signal.SIGKILL), (0.2, None))

_LOOP_TIMEOUT = 0.5  # seconds until the loop must have noticed a signal


class Shutdown:
    """The state of a job's shutdown, which follows a `Plan`.

    Args:
        after_sigterm: the plan for an end by SIGTERM.

    Attributes:
        signalled: the signal that ended ringrun; None if there was no signal.
        stopping: whether the ranks have got a signal to end.
        given_up: whether the last step of the plan has passed. Some ranks may still
            run.
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
        """Starts to end the job.

        Args:
            plan: signals for the ranks.
            wait: replaces the first pause of the plan.
        """
        self._plan = deque(plan)
        self._next = time.monotonic() + (plan[0][0] if wait is None else wait)

    def interrupt(self, number: int) -> None:
        """Ends the job because of a signal. A second signal ends it immediately."""
        again = self.signalled is not None
        self.signalled = self.signalled or number
        if again:
            self.start(AT_ONCE)
        else:
            plans = {signal.SIGINT: AFTER_SIGINT, signal.SIGTERM: self._after_sigterm}
            self.start(plans.get(signal.Signals(number), AFTER_SIGTERM))

    @property
    def time_left(self) -> float | None:
        """The seconds that the ranks have left to end; None before the first signal."""
        left = sum(seconds for seconds, _ in self._plan)
        return left if self.stopping else None

    def timeout(self, longest: float) -> float:
        """Returns the seconds until the next signal is due, at most `longest`."""
        if not self._plan:
            return longest
        return min(longest, max(0.0, self._next - time.monotonic()))

    def due_signals(self) -> Iterator[int]:
        """Yields the signals that are due now."""
        while self._plan and time.monotonic() >= self._next:
            number = self._plan.popleft()[1]
            if self._plan:
                self._next = time.monotonic() + self._plan[0][0]
            if number is None:
                self.given_up = True
                return
            self.stopping = True
            yield int(number)


class InterruptibleJob(Protocol):
    """The methods of a job that its signal handlers call."""

    def interrupt(self, number: int) -> None: ...

    def forward_signal(self, number: int) -> None: ...

    def detach(self) -> bool: ...

    def time_left(self) -> float | None: ...


class ShutdownSignals:
    """Handlers of ringrun's own signals.

    SIGINT, SIGTERM and SIGHUP end the job, and a second signal ends the job
    immediately. After SIGTERM an elastic job whose hosts have joined by `ringrun
    --join` may continue without ringrun. SIGUSR1 goes to the ranks.
    """

    def __init__(self, job: InterruptibleJob) -> None:
        self._job = job
        self._first: int | None = None
        self._late = False

    def install(self) -> None:
        """Installs the handlers and unblocks all signals."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP. A shell ignores SIGINT for a script's background
            # jobs. Keep ignoring these signals.
            ignored = signal.getsignal(number) == signal.SIG_IGN
            if number == signal.SIGTERM or not ignored:
                signal.signal(number, self._handle)
        signal.signal(signal.SIGUSR1, self._forward)
        signal.signal(signal.SIGALRM, self._expire)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def ignore_alarm(self) -> None:
        """Ignores a pending alarm, because the job is over and ringrun is ending."""
        signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._job.forward_signal(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and not self._first and self._job.detach():
            return
        self._late = self._first is not None
        self._first = self._first or number
        self._job.interrupt(number)
        signal.setitimer(signal.ITIMER_REAL, 0.4 if self._late else _LOOP_TIMEOUT)

    def _expire(self, number: int, frame: FrameType | None) -> None:
        """Ends ringrun if its loop does not react.

        The loop may block in a write to a terminal that is not read. Then ringrun just
        exits. The agents notice the exit and end the ranks.
        """
        time_left = self._job.time_left()
        if self._late or time_left is None:
            os._exit(128 + (self._first or number))
        self._late = True
        signal.setitimer(signal.ITIMER_REAL, time_left or _LOOP_TIMEOUT)
