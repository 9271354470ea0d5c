"""Goodput: the share of a job's time that made progress, and what took the rest.

The time of a job is the time of its launcher times the ranks that were wanted. Each
second of each wanted rank has one part. The launcher knows when ranks became members
and ended, and each rank says in its time reports how it spent the time between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ringjax.monitor.time_report import TimeReport

PROGRESS = "progress"
# The parts of the time that made no progress, in the order of the line.
LOST = (
    *("start", "compile", "losses", "joins", "repeated steps", "stragglers"),
    *("checkpoints", "other", "end"),
)

# Seconds by which a report may be older than its rank is known to the launcher.
_MAX_DELAY = 5.0


@dataclass(slots=True)
class _MemberTime:
    """The time of one worker since it became a member.

    Attributes:
        since, until: when the worker became a member, and when it ended.
        joined: whether the worker joined after the start of the job.
        report: the latest report, received at `received`; before it, the reports of
            earlier calls of `init` in this process are in `earlier`.
        base: what the rank had spent before this launcher came.
        silent: the seconds that others waited until they knew that the worker was lost.
        elsewhere: the seconds of other workers in which this worker may have waited
            for them, at the time when this worker became a member.
    """

    since: float
    joined: bool
    elsewhere: dict[str, float]
    until: float | None = None
    report: TimeReport | None = None
    received: float = 0.0
    earlier: list[TimeReport] = field(default_factory=list)
    base: TimeReport = field(default_factory=TimeReport)
    silent: float = 0.0

    def total(self, name: str) -> float:
        """Returns a field of all reports together, without that of `base`."""
        reports = [*self.earlier, *([self.report] if self.report else [])]
        seconds = sum(getattr(each, name) for each in reports)
        return float(seconds - getattr(self.base, name))


class JobTime:
    """Divides the time of a job into parts. This class reads no clock.

    Args:
        wanted: the number of ranks that the user has asked for.
        now: when the launcher started, on the clock of the caller.

    Example:
        >>> time = JobTime(2, now=0.0)
        >>> time.change_members([0, 1], now=1.0)
        >>> for rank in range(2):
        ...     time.add_report(rank, TimeReport(9.0, trains=True, start=2.0), 10.0)
        >>> shares = time.shares(10.0)
        >>> round(shares["progress"], 3), round(shares["start"], 3)
        (0.7, 0.3)
    """

    def __init__(self, wanted: int, now: float) -> None:
        self._wanted, self._began, self._counted = wanted, now, now
        self._all: dict[int, _MemberTime] = {}
        self._present: set[int] = set()
        # For each worker that left its epoch, the losses that the others had reported.
        self._losses_before: dict[int, dict[int, float]] = {}
        self._gone: set[int] = set()  # members whose processes have ended
        self._finished = 0
        self._pending: set[int] = set()  # processes that are not members yet
        self._vacant = dict.fromkeys(LOST, 0.0)

    @property
    def seconds(self) -> float:
        """The seconds that the parts cover, of the launcher's clock."""
        return self._counted - self._began

    # -- events ------------------------------------------------------------------------

    def add_process(self, worker: int, now: float) -> None:
        """Records that a process was started, which is no member yet."""
        self._count_until(now)
        self._pending.add(worker)

    def change_members(self, workers: Sequence[int], now: float) -> None:
        """Records the workers of a new epoch."""
        self._count_until(now)
        joined = bool(self._all)
        for worker in (w for w in workers if w not in self._all):
            elsewhere = {part: self._most(part) for part in ("checkpoints", "compile")}
            self._all[worker] = _MemberTime(now, joined, elsewhere)
        for worker in self._present.difference(workers):
            self._end(worker, now)
            others = self._present.intersection(workers)
            self._losses_before[worker] = {
                other: self._all[other].total("losses") for other in others
            }
        ended = {w for w in workers if self._all[w].until is not None}
        self._present = set(workers) - ended
        self._pending.difference_update(workers)
        self._wanted = max(self._wanted, len(self._present) + self._finished)

    def end_process(self, worker: int, now: float, *, how: str = "lost") -> None:
        """Records the end of a process: "lost", "finished", or "left" as asked to."""
        self._count_until(now)
        self._pending.discard(worker)
        if worker not in self._all or worker in self._gone:
            return
        self._gone.add(worker)
        self._present.discard(worker)
        self._end(worker, now)
        self._finished += how == "finished"
        # A rank that leaves because it was asked to is not wanted any more.
        self._wanted = max(self._wanted - (how == "left"), 1)

    def _end(self, worker: int, now: float) -> None:
        if self._all[worker].until is None:
            self._all[worker].until = now

    def add_report(self, worker: int, report: TimeReport, now: float) -> None:
        if worker not in self._all:
            self._admit_unknown(worker, report.age, now)
        member = self._all[worker]
        before = member.report
        if before is None and report.age > now - member.since + _MAX_DELAY:
            member.base = report  # an earlier launcher has started this rank
        elif before is not None and report.age < before.age:
            member.earlier.append(before)  # the process has called `init` again
        member.report, member.received = report, now
        for gone, before_loss in self._losses_before.items():
            if worker in before_loss:
                waited = member.total("losses") - before_loss.pop(worker)
                self._all[gone].silent = max(self._all[gone].silent, waited)

    def _admit_unknown(self, worker: int, age: float, now: float) -> None:
        """Makes a rank of JAX's own collectives a member, which no coordinator did."""
        self.change_members([*self._present, worker], now)
        member = self._all[worker]
        member.joined, member.since = False, max(self._began, now - age)
        counted = min(self._vacant["start"], now - member.since)
        self._vacant["start"] -= counted

    def _count_until(self, now: float) -> None:
        """Adds the time since the last event of ranks that were no members."""
        passed = max(0.0, now - self._counted)
        self._counted = max(now, self._counted)
        missing = max(0, self._wanted - len(self._present) - self._finished)
        if not self._all:
            self._vacant["start"] += passed * self._wanted
            return
        coming = min(missing, len(self._pending))
        self._vacant["joins"] += passed * coming
        self._vacant["losses"] += passed * (missing - coming)
        self._vacant["end"] += passed * self._finished

    # -- results -----------------------------------------------------------------------

    def shares(self, now: float) -> dict[str, float]:
        """Returns the share of each part, which sum to 1; {} if no rank trains yet."""
        self._count_until(now)
        members = self._all.values()
        if not any(m.report is not None and m.report.trains for m in members):
            return {}
        parts = {PROGRESS: 0.0, **self._vacant}
        for member in members:
            for part, seconds in self._divide(member, now).items():
                parts[part] += seconds
        whole = sum(parts.values()) or 1.0
        return {part: seconds / whole for part, seconds in parts.items()}

    def _divide(self, member: _MemberTime, now: float) -> dict[str, float]:
        until = now if member.until is None else member.until
        begins = "joins" if member.joined else "start"
        parts = dict.fromkeys(LOST, 0.0)
        left = until - member.since
        report = member.report
        if report is None or not report.trains:
            parts[begins] = left
            if report is None:
                parts[begins] = min(left, self._usual_start(joined=member.joined))
            return {PROGRESS: left - parts[begins], **parts}
        parts[begins] = member.total("start")
        parts["compile"] = member.total("compile") + member.total("recompile")
        parts["repeated steps"] = member.total("repeated")
        parts["stragglers"] = member.total("waiting")
        for name in ("checkpoints", "other", "losses", "joins"):
            parts[name] += member.total(name)
        # A rank that froze has not trained until it was declared lost.
        unreported = max(0.0, until - member.received)
        parts["losses"] += min(member.silent, unreported)
        if report.last:
            parts["end"] = report.end + unreported
        self._explain_waits(member, parts)
        # The clocks of a rank and of the launcher begin some milliseconds apart.
        spent = sum(parts.values())
        if spent > left:
            parts = {part: s * left / spent for part, s in parts.items()}
        return {PROGRESS: max(0.0, left - spent), **parts}

    def _usual_start(self, *, joined: bool) -> float:
        """Returns how long the start of other ranks took, for one without a report.

        A rank that is killed soon has not reported yet, but has trained with others.
        """
        members = (m for m in self._all.values() if m.joined == joined)
        trained = [m for m in members if m.report is not None and m.report.trains]
        starts = [m.total("start") + m.total("compile") for m in trained]
        return sum(starts) / len(starts) if starts else math.inf

    def _explain_waits(self, member: _MemberTime, parts: dict[str, float]) -> None:
        """Moves waiting to what another rank did meanwhile: checkpoints, compiling.

        Ranks train in step, so a rank that has spent less time on checkpoints than
        another one has waited for the difference. So no clocks of ranks are compared.
        """
        own = {
            "checkpoints": member.total("checkpoints"),
            "compile": member.total("recompile"),
            "joins": member.total("joins"),
        }
        for part, seconds in own.items():
            if part == "joins":
                longest = self._longest_join(member)
            else:
                longest = self._most(part) - member.elsewhere[part]
            moved = min(parts["stragglers"], max(0.0, longest - seconds))
            parts["stragglers"] -= moved
            parts[part] += moved

    def _most(self, part: str) -> float:
        name = {"compile": "recompile"}.get(part, part)
        return max((m.total(name) for m in self._all.values()), default=0.0)

    def _longest_join(self, member: _MemberTime) -> float:
        """Returns how long later workers needed from their admission to a step."""
        until = math.inf if member.until is None else member.until
        return sum(
            other.total("start") + other.total("compile")
            for other in self._all.values()
            if other.joined and member.since < other.since < until
        )


def format_goodput(shares: Mapping[str, float], seconds: float) -> str:
    """Formats shares as one line, with the parts of at least 0.1 %.

    The percentages sum to 100.0, except for the parts that the line omits.

    Example:
        >>> format_goodput({"progress": 0.9, "start": 0.08, "end": 0.02}, 134)
        'goodput 90.0 % of 2 min 14 s: start 8.0 %, end 2.0 %'
    """
    rounded = _rounded(shares)
    lost = [f"{p} {rounded[p]:.1f} %" for p in LOST if rounded.get(p, 0.0) > 0]
    more = f": {', '.join(lost)}" if lost else ""
    return f"goodput {rounded[PROGRESS]:.1f} % of {_duration(seconds)}{more}"


def _rounded(shares: Mapping[str, float]) -> dict[str, float]:
    """Rounds shares to tenths of a percent that sum to 100.0."""
    tenths = {part: int(share * 1000) for part, share in shares.items()}
    by_rest = sorted(shares, key=lambda p: tenths[p] - shares[p] * 1000)
    for part in by_rest[: 1000 - sum(tenths.values())]:
        tenths[part] += 1
    return {part: each / 10 for part, each in tenths.items()}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
