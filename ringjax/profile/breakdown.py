"""Where the time of a profile went, as numbers and as text.

Of each rank: computing, moving data, waiting for others; and who was late. Named
operations and buckets that overlap may run beside the program: of the latter the core
knows for how long the program waited at the end, which is shared out between waiting
and moving as these buckets did; of the former only that they were under way.
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
    boundaries,
    covered,
    together,
)
from ringjax.profile.parts import ProfilePart, missing


@dataclass(frozen=True, slots=True)
class RankBreakdown:
    """One rank's time, in seconds of a mean step; if it has none, of all.

    Attributes:
        steps: how many there are, `typical` the median of them.
        last_in: in which share of the exchanges it came last; `late_by`: how late then,
            in the middle, where it is worth a word; `lost`: and in all, if often.
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
    """All parts, on one time base.

    Raises:
        ProfileNotFound: from `read`, before it comes to this.
    """

    parts: Sequence[ProfilePart]
    base: CommonClock
    exchanges: Sequence[Exchange]

    @classmethod
    def of(cls, parts: list[ProfilePart]) -> MergedProfile:
        """Brings them together."""
        base = CommonClock(parts)
        return cls(parts, base, together(parts, base))


def ranks(profile: MergedProfile) -> list[RankBreakdown]:
    """Of each rank what its time was spent on."""
    shares: dict[int, list[RankExchange]] = {id(part): [] for part in profile.parts}
    late: dict[int, list[float]] = {id(part): [] for part in profile.parts}
    sizes = Counter(m.epoch for part in profile.parts for m in part.members)
    judged = 0
    for exchange in profile.exchanges:
        for share in exchange.shares:
            shares[id(share.part)].append(share)
        if (
            exchange.number[1] == 0
            and len(exchange.shares) == sizes[exchange.number[0]]
        ):
            judged += 1
            late[id(exchange.last.part)].append(exchange.late_by)
    return [
        _rank(part, profile.base, shares[id(part)], late[id(part)], judged)
        for part in profile.parts
    ]


def _rank(
    part: ProfilePart,
    base: CommonClock,
    shares: list[RankExchange],
    late: list[float],
    judged: int,
) -> RankBreakdown:
    ends = boundaries(part, base)
    steps = max(len(ends) - 1, 0)
    if steps:
        start, end = ends[0], ends[-1]
    else:
        start = min((share.entered for share in shares), default=0.0)
        end = max((share.done for share in shares), default=0.0)
    waits, moves = _spent((s for s in shares if s.exposed), start, end)
    behind = _spent((s for s in shares if not s.exposed), start, end)
    if all_of_it := sum(behind):
        exposed = _exposed(part, base, start, end)
        waits += exposed * behind[0] / all_of_it
        moves += exposed * behind[1] / all_of_it
    each = max(steps, 1)
    worth = [by for by in late if by >= MIN_COST * (end - start) / each]
    return RankBreakdown(
        part,
        steps,
        median(b - a for a, b in pairwise(ends)) if steps else end - start,
        (end - start) / each,
        max(end - start - waits - moves, 0.0) / each,
        moves / each,
        waits / each,
        len(late) / judged if judged else 0.0,
        median(worth or late or [0.0]),
        len(worth) * median(worth) if len(worth) >= MIN_CALLS else 0.0,
    )


def _spent(
    shares: Iterable[RankExchange], start: float, end: float
) -> tuple[float, float]:
    """Seconds between the two in which some of them waited, and in which some moved."""
    found = list(shares)
    waits = covered(((s.entered, s.entered + s.wait) for s in found), start, end)
    return waits, covered(((s.entered, s.done) for s in found), start, end) - waits


def _exposed(part: ProfilePart, base: CommonClock, start: float, end: float) -> float:
    """Seconds in which the program waited for buckets that overlap."""
    known = [(base.seconds(part, when), total) for when, _, total in part.sent]
    after = [bisect_right(known, (when, math.inf)) for when in (start, end)]
    totals = []
    for when, at in zip((start, end), after, strict=True):
        if at in (0, len(known)):
            totals.append(known[-1][1] if at else 0.0)
            continue
        (before, low), (later, high) = known[at - 1 : at + 1]
        totals.append(low + (high - low) * (when - before) / (later - before))
    return max(totals[1] - totals[0], 0.0)


def size(count: float) -> str:
    """Of bytes, with three digits.

    Example:
        >>> size(8_400_000), size(12), size(2_600)
        ('8.4 MB', '12 B', '2.6 kB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def text(profile: MergedProfile, files: Iterable[str] = ()) -> str:
    """What `show` prints: at most 80 columns, beside long names.

    Args:
        files: what was made of the profile, a line each.
    """
    lines = [_head(profile)]
    if profile.exchanges:
        found = ranks(profile)
        lines += [_step(found), "", *_table(found), "", *_kinds(profile)]
    else:
        lines.append("no rank has ended a collective meanwhile")
    if gone := missing(list(profile.parts)):
        lines += ["", "missing:", *(f"  {sentence}" for sentence in gone)]
    return "\n".join([*lines, *(["", *files] if files else [])])


def _head(profile: MergedProfile) -> str:
    parts, base = profile.parts, profile.base
    hosts = len({part.host for part in parts})
    end = max((s.done for e in profile.exchanges for s in e.shares), default=0.0)
    if base.error is None:
        clocks = "clocks by the time of day: no rank was asked what its clock shows"
    elif base.error:
        clocks = f"clocks agree within {_ms(base.error)} ms"
    else:
        clocks = "one clock"
    return (
        f"{len(parts)} rank{'s' * (len(parts) > 1)} on {hosts} "
        f"host{'s' * (hosts > 1)}, {len(profile.exchanges)} calls in {end:.3g} s; "
        f"{clocks}"
    )


def _step(found: Sequence[RankBreakdown]) -> str:
    """The mean of all ranks."""
    computes, moves, waits = (
        fmean(getattr(rank, name) for rank in found)
        for name in ("computes", "moves", "waits")
    )
    whole = max(computes + moves + waits, 1e-12)
    most = max(rank.steps for rank in found)
    typical = _ms(median(rank.typical for rank in found))
    what = f"{most} steps of {typical} ms" if most else f"no steps; {typical} ms"
    shares = (
        f"{name} {_ms(seconds)} ({seconds / whole:.0%})"
        for name, seconds in (
            ("compute", computes), ("exposed comm", moves), ("waiting", waits)
        )
    )  # fmt: skip
    return f"{what}   {'   '.join(shares)}"


def _table(found: Sequence[RankBreakdown]) -> list[str]:
    lines = [
        f"{'ms a step':10} {'host':10} {'all':>6} {'compute':>7} {'comm':>6} "
        f"{'wait':>6} {'last in':>7} {'late by':>7}"
    ]
    worst = max(found, key=lambda rank: rank.lost)
    others = sum(rank.lost for rank in found) - worst.lost
    named = worst.lost > 2 * others
    for rank in found:
        times = (rank.step, rank.computes, rank.moves, rank.waits)
        lines.append(
            f"{rank.part.who:10} {rank.part.host[:10]:10} "
            + "{:>6} {:>7} {:>6} {:>6}".format(*map(_ms, times))
            + f" {rank.last_in:>7.0%} {_ms(rank.late_by):>7}"
            + ("  <- slowest" if rank is worst and named else "")
        )
    if any(call.lane == "named" for rank in found for call in rank.part.calls):
        lines.append("named operations count while they are under way, exposed or not")
    return lines


def _kinds(profile: MergedProfile) -> list[str]:
    """The operations that took longest, of the mean rank."""
    totals: dict[tuple[str, str, str], list[float]] = {}
    algorithms: dict[tuple[str, str, str], Counter[str]] = {}
    for exchange in profile.exchanges:
        for share in exchange.shares:
            call = share.calls[0]
            several = f" + {len(share.calls) - 1} more" * (len(share.calls) > 1)
            key = (call.op, call.name + several, call.lane)
            seen = totals.setdefault(key, [0.0] * 4)
            for i, value in enumerate((1, share.bytes, share.wait, share.move)):
                seen[i] += value
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
            f"{size(total / count):>7} {_ms(waits / count):>7} "
            f"{_ms(moves / count):>7} {speed:>6}  "
            f"{algorithms[key].most_common(1)[0][0]}"
        )
    if len(longest) > 10:
        lines.append(f"... and {len(longest) - 10} more")
    return lines


def _ms(seconds: float) -> str:
    """Milliseconds: three digits, and seldom more than two behind the point."""
    ms = seconds * 1e3
    if 0 < ms < 0.1:
        return f"{ms:.3f}"
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"
