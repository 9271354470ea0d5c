"""The outcome of a job, and texts that describe how a rank has failed."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

# Patterns of errors that are a consequence of the failure of another rank.
_CONSEQUENCE = re.compile(
    r"\bPeerLost\b|\bUNAVAILABLE: RINGJAX\["
    # JAX raises these errors in the other processes of a group if one process fails.
    r"|\bGloo \w+ failed\b|\bcoordination service\b"
)

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job has ended.

    Attributes:
        rank: the rank that failed first; -1 if none failed.
        reason: the reason why the job has failed, in one line.
        results: pickled results by rank.
        left: whether all ranks left at a commit because ringrun asked them to leave.
    """

    exit_code: int
    rank: int = -1
    reason: str = ""
    results: Mapping[int, bytes] = field(default_factory=dict)
    left: bool = False


def describe_failure(
    code: int, *, text: str = "", report: str = "", last_words: str = "", how: str = ""
) -> str:
    """Describes how a rank has failed, as the text after the rank's name.

    Args:
        code: exit code of the rank, not 0.
        text: explanation from the agent, if the command could not run.
        report: error that the rank has sent to the coordinator.
        last_words: last line that the rank has written to standard error.
        how: replaces the words about the exit code.

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
    name = signal_name(code - 128) if code > 128 else ""
    if name:
        how = f"killed by {name}"
        if code - 128 in _FROM_OUTSIDE and not report:
            words = ""  # output before a signal does not explain the signal
    if not words:
        return f" was {how}" if name else f" failed with {how}"
    return f" failed: {first_line(words)} ({how})"


def blames_another_rank(words: str) -> bool:
    """Returns whether the text of an error says that another rank has failed.

    Example:
        >>> blames_another_rank("PeerLost: rank 1 failed: ValueError: boom")
        True
    """
    return bool(_CONSEQUENCE.search(words))


def first_line(text: str) -> str:
    """Returns at most 500 characters of the first line of an error report."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 500 else line[:497] + "..."


def last_line(text: str) -> str:
    """Returns the last line of a traceback, which names the error."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""


def signal_name(number: int) -> str:
    """Returns the number and the name of a signal; empty if there is no such signal."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return ""
