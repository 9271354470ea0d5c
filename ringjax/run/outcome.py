"""The outcome of a job, and texts that describe how a rank has failed."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

# Patterns of errors that only follow from the failure of another rank.
_CONSEQUENCE = re.compile(
    r"\bPeerLost\b|\bUNAVAILABLE: RINGJAX\["
    # JAX raises these errors in all other processes of a group if one process fails.
    r"|\bGloo \w+ failed\b|\bcoordination service\b"
)

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of a job: how it has ended, and what the ranks have returned.

    Attributes:
        rank: the rank that failed first, or -1 if no rank failed. reason: the reason
        why the job has failed, in one line. results: the pickled results, by rank.
        left: whether all ranks left at a commit because ringrun requested that.
    """

    exit_code: int
    rank: int = -1
    reason: str = ""
    results: Mapping[int, bytes] = field(default_factory=dict)
    left: bool = False


def describe_failure(
    code: int, *, text: str = "", report: str = "", last_words: str = "", how: str = ""
) -> str:
    """Describes how a rank has failed, in words that follow the rank's name.

    Args:
        code: exit code of the rank, not 0. text: the agent's explanation, if the
        command could not run. report: the error that the rank has reported to the
        coordinator. last_words: the last line that the rank has written to standard
        error. how: words to use in place of the exit code.

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
    """Returns whether an error text says that another rank has failed.

    Example:
        >>> blames_another_rank("PeerLost: rank 1 failed: ValueError: boom")
        True
    """
    return bool(_CONSEQUENCE.search(words))


def first_line(text: str) -> str:
    """Returns the first line of an error report, cut to 500 characters."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 500 else line[:497] + "..."


def last_line(text: str) -> str:
    """Returns the last line of a traceback, which names the error."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""


def signal_name(number: int) -> str:
    """Returns a signal's number and name, or "" if there is no such signal."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return ""
