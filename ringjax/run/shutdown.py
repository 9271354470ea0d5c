"""How a job is brought to its end, and the words for how it has ended.

The timetable: a signal, some patience, a harder signal; job.py sends them. Whom to
blame is decided in workers.py; one line says why.
"""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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

# Errors that say "another rank failed". They blame somebody else.
_CONSEQUENCE = re.compile(
    r"\bPeerLost\b|\bUNAVAILABLE: RINGJAX\["
    # JAX says this in another process of the group that the failed rank is in.
    r"|\bGloo \w+ failed\b|\bcoordination service\b"
)

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended.

    Attributes:
        rank: the one to blame, -1 if there is none.
        reason: one line why, if there was no success.
        results: what ranks have returned.
        left: nobody is to blame: the ranks left because their places are wanted for
            something else.
    """

    exit_code: int
    rank: int = -1
    reason: str = ""
    results: Mapping[int, bytes] = field(default_factory=dict)
    left: bool = False


class Shutdown:
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
    def started(self) -> bool:
        """Whether there is a plan."""
        return bool(self._plan) or self.given_up

    def start(self, plan: Plan, wait: float | None = None) -> None:
        """Begin to end the job; `wait` instead of the plan's first pause."""
        self._plan = deque(plan)
        self._next = time.monotonic() + (plan[0][0] if wait is None else wait)

    def interrupt(self, number: int) -> None:
        """End the job because ringrun got a signal; a second one ends it at once."""
        again = self.signalled is not None
        self.signalled = self.signalled or number
        if again:
            self.start(AT_ONCE)
        else:
            plans = {signal.SIGINT: AFTER_SIGINT, signal.SIGTERM: self._after_sigterm}
            self.start(plans.get(signal.Signals(number), AFTER_SIGTERM))

    @property
    def time_left(self) -> float | None:
        """Seconds that the ranks have to end, None if nobody has told them to."""
        left = sum(seconds for seconds, _ in self._plan)
        return left if self.stopping else None

    def timeout(self, longest: float) -> float:
        """Seconds until `due` has something, at most `longest`."""
        if not self._plan:
            return longest
        return min(longest, max(0.0, self._next - time.monotonic()))

    def due_signals(self) -> Iterator[int]:
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


def describe_failure(
    code: int,
    *,
    text: str = "",
    report: str = "",
    last_words: str = "",
    how: str = "",
) -> str:
    """Says how a rank has failed, for a sentence that begins with its name.

    Args:
        code: its exit code, not 0.
        text: what the agent says of it.
        report: what it said itself before it went down.
        last_words: what it wrote last.
        how: how it ended, if the exit code does not say.

    Example:
        >>> "rank 2" + describe_failure(137)
        'rank 2 was killed by signal 9 (SIGKILL)'
        >>> "rank 2" + describe_failure(1, report="ValueError: boom")
        'rank 2 failed: ValueError: boom (exit code 1)'
    """
    if text:
        return f": {text}"
    words = report or last_words
    how = how or f"exit code {code}"
    name = _signal_name(code - 128) if code > 128 else ""
    if name:
        how = f"killed by {name}"
        if code - 128 in _FROM_OUTSIDE and not report:
            words = ""  # what it wrote before has nothing to do with it
    if not words:
        return f" was {how}" if name else f" failed with {how}"
    return f" failed: {first_line(words)} ({how})"


def blames_another_rank(words: str) -> bool:
    """Whether an error says that another rank failed.

    Example:
        >>> blames_another_rank("PeerLost: rank 1 failed: ValueError: boom")
        True
    """
    return bool(_CONSEQUENCE.search(words))


def first_line(text: str) -> str:
    """The first line of a report, cut to what a terminal can show."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 500 else line[:497] + "..."


def last_line(text: str) -> str:
    """The last line of a traceback, which names the error."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return ""
