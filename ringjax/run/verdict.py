"""Which rank failed first, and why: from exit codes, reports and last words.

One failure brings down every other rank within milliseconds, and the news may overtake
each other: a rank that lost its peer can end before the peer that raised. So exits,
reports to the coordinator and what the ranks wrote are weighed together.
Pure bookkeeping; sends nothing, waits for nothing.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

# Errors that say "another rank failed". They blame somebody else.
_CONSEQUENCE = re.compile(
    r"\bPeerLost\b|\bUNAVAILABLE: RINGJAX\["
    # What JAX says in a process of the same group.
    r"|\bGloo \w+ failed\b|\bcoordination service\b"
)

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(slots=True)
class _Rank:
    host: str
    exit_code: int | None = None
    exit_time: float = 0.0
    exit_text: str = ""
    ours: bool = False  # ended after we began to end the job
    report: str = ""
    report_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Blame:
    """The rank that failed first, the exit code of the job, and one line why.

    In an elastic job `worker` is the number of its process.
    """

    rank: int
    exit_code: int
    reason: str
    worker: int = -1


class Verdict:
    """Collects what becomes of the ranks; `hosts[r]` is where rank r runs."""

    def __init__(self, hosts: list[str], last_words: Callable[[int], str]) -> None:
        self._ranks = [_Rank(host) for host in hosts]
        self._last_words = last_words
        self._several = len(set(hosts)) > 1
        self.is_stopping = False

    @property
    def over(self) -> bool:
        """Whether every rank has ended."""
        return all(rank.exit_code is not None for rank in self._ranks)

    @property
    def failed(self) -> bool:
        """Whether a rank has ended with an error."""
        return any(rank.exit_code for rank in self._ranks)

    def hangs(self, now: float, limit: float) -> int | None:
        """A rank that has told that it fails, and has not ended `limit` seconds later.

        A thread that is no daemon, or an exit handler, keeps its process.
        """
        for number, rank in enumerate(self._ranks):
            late = now - rank.report_time > limit
            if rank.report and rank.exit_code is None and late:
                return number
        return None

    @property
    def told(self) -> bool:
        """Whether a rank has told that it fails."""
        return any(rank.report for rank in self._ranks)

    def stopping(self) -> None:
        """From now on ranks end because we make them."""
        self.is_stopping = True

    def exited(self, rank: int, code: int, now: float, text: str = "") -> None:
        """A rank has ended with an exit code; `text` if there is more to say."""
        state = self._ranks[rank]
        if state.exit_code is None:
            state.exit_code = code
            state.exit_time = now
            state.exit_text = text
            state.ours = self.is_stopping

    def reported(self, rank: int, text: str, now: float) -> None:
        """A rank has told the coordinator that it fails."""
        if 0 <= rank < len(self._ranks) and not self._ranks[rank].report:
            self._ranks[rank].report = text.strip()
            self._ranks[rank].report_time = now

    def first(self) -> Blame | None:
        """The rank to blame, None if no rank failed by itself."""
        candidates = []
        for number, rank in enumerate(self._ranks):
            if not rank.exit_code or (rank.ours and not rank.report):
                continue
            when = rank.exit_time
            if rank.report:
                when = min(when, rank.report_time)
            words = rank.report or rank.exit_text or self._last_words(number)
            candidates.append((blames_others(words), when, number))
        if not candidates:
            return None
        number = min(candidates)[2]
        return self._blame(number, self._ranks[number])

    def _blame(self, number: int, rank: _Rank) -> Blame:
        code = rank.exit_code or 1
        who = f"rank {number}"
        if self._several:
            who += f" ({rank.host})"
        if rank.ours:  # it reported, then hung until we ended it
            return Blame(number, 1, f"{who} failed: {one_line(rank.report)}")
        words = self._last_words(number)
        why = fate(code, text=rank.exit_text, report=rank.report, last_words=words)
        return Blame(number, code, who + why)


def fate(
    code: int,
    *,
    text: str = "",
    report: str = "",
    last_words: str = "",
    how: str = "",
) -> str:
    """What became of a rank, to be put behind its name.

    Args:
        code: its exit code, not 0.
        text: what the agent says of it.
        report: what it said itself before it went down.
        last_words: what it wrote last.
        how: how it ended, if the exit code does not say.

    Example:
        >>> "rank 2" + fate(137)
        'rank 2 was killed by signal 9 (SIGKILL)'
        >>> "rank 2" + fate(1, report="ValueError: boom")
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
    return f" failed: {one_line(words)} ({how})"


def blames_others(words: str) -> bool:
    """Whether an error says that another rank failed.

    Example:
        >>> blames_others("PeerLost: rank 1 failed: ValueError: boom")
        True
    """
    return bool(_CONSEQUENCE.search(words))


def one_line(text: str) -> str:
    """The first line of a report, cut to what a terminal can show."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 500 else line[:497] + "..."


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return ""
