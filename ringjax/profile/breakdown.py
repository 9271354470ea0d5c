"""Computes where the time of a profile went, and formats it as text.

The time of each rank is split into computing, moving data and waiting for other ranks.
Named operations and overlapped buckets may run while the program computes. For
overlapped buckets, the native core measures how long the program waited at the end of a
step. This time is split in the ratio in which the buckets waited and moved data. For
named operations, the whole time between start and end counts as communication, because
it is unknown how long the program waited.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from ringjax.monitor.stragglers import MIN_CALLS, MIN_COST
from ringjax.profile.clocks import CommonClock
from ringjax.profile.exchanges import (
    Exchange,
    RankExchange,
    covered_seconds,
    match_calls,
    step_ends,
)
from ringjax.profile.parts import ProfilePart, describe_missing


@dataclass(frozen=True, slots=True)
class RankBreakdown:
    """The seconds that one rank has computed, moved data and waited.

    Attributes:
        steps: the number of steps. If it is 0, the whole profile counts as one step.
        typical: the median duration of a step.
        step: the mean duration of a step, the sum of `computes`, `moves` and `waits`.
        last_in: the share of the calls in which the rank came last.
        late_by: the median delay in the calls in which the rank came last. If some
            delays are long enough to cost other ranks time, only these delays count.
        lost: an estimate of the time that other ranks waited for this rank.
    """

    part: ProfilePart
    steps: int
    typical: float
    step: float
    computes: float
    moves: float
    waits: float
    last_in: float
    late_by: float
    lost: float


@dataclass(frozen=True, slots=True)
class MergedProfile:
    """The recorded files of all ranks, and the clock to which times are converted."""

    parts: Sequence[ProfilePart]
    clock: CommonClock
    exchanges: Sequence[Exchange]

    @classmethod
    def of(cls, parts: list[ProfilePart]) -> MergedProfile:
        clock = CommonClock(parts)
        return cls(parts, clock, match_calls(parts, clock))


def rank_breakdowns(profile: MergedProfile) -> list[RankBreakdown]:
    by_part: dict[int, list[RankExchange]] = {id(part): [] for part in profile.parts}
    delays: dict[int, list[float]] = {id(part): [] for part in profile.parts}
    sizes = Counter(m.epoch for part in profile.parts for m in part.members)
    complete = 0
    for exchange in profile.exchanges:
        for rank in exchange.ranks:
            by_part[id(rank.part)].append(rank)
        epoch, process_set, *_ = exchange.call_id
        # Use only calls that all ranks have recorded: they show which rank came last.
        if process_set == 0 and len(exchange.ranks) == sizes[epoch]:
            complete += 1
            delays[id(exchange.last.part)].append(exchange.late_by)
    return [
        _break_down(part, profile.clock, by_part[id(part)], delays[id(part)], complete)
        for part in profile.parts
    ]


def _break_down(
    part: ProfilePart,
    clock: CommonClock,
    exchanges: list[RankExchange],
    delays: list[float],
    complete: int,
) -> RankBreakdown:
    ends = step_ends(part, clock)
    steps = max(len(ends) - 1, 0)
    if steps:
        start, end = ends[0], ends[-1]
    else:
        start = min((exchange.entered for exchange in exchanges), default=0.0)
        end = max((exchange.done for exchange in exchanges), default=0.0)
    waits, moves = _waited_and_moved((e for e in exchanges if e.exposed), start, end)
    hidden = _waited_and_moved((e for e in exchanges if not e.exposed), start, end)
    if sum(hidden):
        exposed = _exposed_seconds(part, clock, start, end)
        waits += exposed * hidden[0] / sum(hidden)
        moves += exposed * hidden[1] / sum(hidden)
    each = max(steps, 1)
    long = [delay for delay in delays if delay >= MIN_COST * (end - start) / each]
    return RankBreakdown(
        part,
        steps=steps,
        typical=median(b - a for a, b in pairwise(ends)) if steps else end - start,
        step=(end - start) / each,
        computes=max(end - start - waits - moves, 0.0) / each,
        moves=moves / each,
        waits=waits / each,
        last_in=len(delays) / complete if complete else 0.0,
        late_by=median(long or delays or [0.0]),
        lost=len(long) * median(long) if len(long) >= MIN_CALLS else 0.0,
    )


def _waited_and_moved(
    exchanges: Iterable[RankExchange], start: float, end: float
) -> tuple[float, float]:
    """Returns the seconds within [start, end] in which calls waited and moved data."""
    found = list(exchanges)
    waits = covered_seconds(
        ((e.entered, e.entered + e.wait) for e in found), start, end
    )
    whole = covered_seconds(((e.entered, e.done) for e in found), start, end)
    return waits, whole - waits


def _exposed_seconds(
    part: ProfilePart, clock: CommonClock, start: float, end: float
) -> float:
    """Returns how long the program waited for overlapped buckets."""
    known = [(clock.seconds(part, when), total) for when, _, total in part.sent]
    totals = []
    for when in (start, end):
        at = bisect_right(known, (when, math.inf))
        if at in (0, len(known)):
            totals.append(known[-1][1] if at else 0.0)
            continue
        (before, low), (later, high) = known[at - 1 : at + 1]
        totals.append(low + (high - low) * (when - before) / (later - before))
    return max(totals[1] - totals[0], 0.0)


def format_size(count: float) -> str:
    """Formats a number of bytes with three digits.

    Example:
        >>> format_size(8_400_000), format_size(12), format_size(2_600)
        ('8.4 MB', '12 B', '2.6 kB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def format_breakdown(profile: MergedProfile, files: Iterable[str] = ()) -> str:
    """Formats the text that `show` prints, and after it the lines `files`.

    Only long names exceed 80 columns.
    """
    lines = [_head(profile)]
    if profile.exchanges:
        ranks = rank_breakdowns(profile)
        lines += [_step_line(ranks), "", *_rank_table(ranks)]
        lines += ["", *_operation_table(profile)]
    else:
        lines.append("no rank has ended a collective meanwhile")
    if missing := describe_missing(list(profile.parts)):
        lines += ["", "missing:", *(f"  {sentence}" for sentence in missing)]
    return "\n".join([*lines, *(["", *files] if files else [])])


def _head(profile: MergedProfile) -> str:
    parts, error = profile.parts, profile.clock.error
    hosts = len({part.host for part in parts})
    end = max((r.done for e in profile.exchanges for r in e.ranks), default=0.0)
    if error is None:
        clocks = "clocks by the time of day: no rank was asked what its clock shows"
    elif error:
        clocks = f"clocks agree within {_ms(error)} ms"
    else:
        clocks = "one clock"
    return (
        f"{len(parts)} rank{'s' * (len(parts) > 1)} on {hosts} "
        f"host{'s' * (hosts > 1)}, {len(profile.exchanges)} calls in {end:.3g} s; "
        f"{clocks}"
    )


def _step_line(ranks: Sequence[RankBreakdown]) -> str:
    """Formats the duration of a step and its parts, as means over all ranks."""
    means = {
        "compute": fmean(rank.computes for rank in ranks),
        "exposed comm": fmean(rank.moves for rank in ranks),
        "waiting": fmean(rank.waits for rank in ranks),
    }
    whole = max(sum(means.values()), 1e-12)
    most = max(rank.steps for rank in ranks)
    typical = _ms(median(rank.typical for rank in ranks))
    steps = f"{most} steps of {typical} ms" if most else f"no steps; {typical} ms"
    shares = (f"{name} {_ms(s)} ({s / whole:.0%})" for name, s in means.items())
    return f"{steps}   {'   '.join(shares)}"


def _rank_table(ranks: Sequence[RankBreakdown]) -> list[str]:
    lines = [
        f"{'ms a step':10} {'host':10} {'all':>6} {'compute':>7} {'comm':>6} "
        f"{'wait':>6} {'last in':>7} {'late by':>7}"
    ]
    worst = max(ranks, key=lambda rank: rank.lost)
    others = sum(rank.lost for rank in ranks) - worst.lost
    has_slowest = worst.lost > 2 * others
    for rank in ranks:
        times = (rank.step, rank.computes, rank.moves, rank.waits)
        lines.append(
            f"{rank.part.who:10} {rank.part.host[:10]:10} "
            + "{:>6} {:>7} {:>6} {:>6}".format(*map(_ms, times))
            + f" {rank.last_in:>7.0%} {_ms(rank.late_by):>7}"
            + ("  <- slowest" if rank is worst and has_slowest else "")
        )
    if any(call.lane == "named" for rank in ranks for call in rank.part.calls):
        lines.append("named operations count while they are under way, exposed or not")
    return lines


def _operation_table(profile: MergedProfile) -> list[str]:
    """Formats the ten operations that took most time, with means per call."""
    totals: dict[tuple[str, str, str], list[float]] = {}
    algorithms: dict[tuple[str, str, str], Counter[str]] = {}
    for exchange in profile.exchanges:
        for rank in exchange.ranks:
            call = rank.calls[0]
            several = f" + {len(rank.calls) - 1} more" * (len(rank.calls) > 1)
            key = (call.op, call.name + several, call.lane)
            sums = totals.setdefault(key, [0.0] * 4)
            for i, value in enumerate((1, rank.bytes, rank.wait, rank.move)):
                sums[i] += value
            algorithms.setdefault(key, Counter())[call.algorithm or "-"] += 1
    lines = [
        f"{'operation':30} {'calls':>6} {'each':>7} {'wait':>7} {'move':>7} "
        f"{'GB/s':>6}  algorithm"
    ]
    longest = sorted(totals, key=lambda k: sum(totals[k][2:]), reverse=True)
    for key in longest[:10]:
        count, total, waits, moves = totals[key]
        speed = f"{total / moves / 1e9:.2f}" if moves > 0 else "-"
        name = " ".join(key[:2]) + (" (jit)" if key[2] == "compiled" else "")
        lines.append(
            f"{name[:30]:30} {count / len(profile.parts):6.4g} "
            f"{format_size(total / count):>7} {_ms(waits / count):>7} "
            f"{_ms(moves / count):>7} {speed:>6}  "
            f"{algorithms[key].most_common(1)[0][0]}"
        )
    if len(longest) > 10:
        lines.append(f"... and {len(longest) - 10} more")
    return lines


def _ms(seconds: float) -> str:
    """Formats milliseconds with three digits."""
    ms = seconds * 1e3
    if 0 < ms < 0.1:
        return f"{ms:.3f}"
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"
