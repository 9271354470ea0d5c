"""Formats a job's statistics as text: reports during the job, a summary at its end."""

from __future__ import annotations

from collections.abc import Sequence

from ringjax.monitor.aggregator import SILENT_SECONDS, Aggregator, RankTotals
from ringjax.monitor.view import View

NO_SAMPLES = "ringjax report: no rank has told anything yet"
_MAX_RANKS = 20


def format_report(view: View) -> str:
    """Formats a window: one line about the job, and one line for each rank."""
    if not view.rows:
        return NO_SAMPLES
    step = f", {format_duration(view.step)} a step" if view.step else ""
    epoch = f", epoch {view.epoch}" if view.epoch else ""
    lines = [
        f"ringjax report: {view.rate:.3g} calls/s{step}, in {view.seconds:.0f} s"
        f"{epoch}",
        f"{'rank':>4}  {'host':12} {'waits':>6} {'moves':>6} {'last in':>8} "
        f"{'late by':>9}  at",
    ]
    for row in view.rows:
        line = (
            f"{row.rank:4}  {row.host[:12]:12} {row.waits:6.0%} {row.moves:6.0%} "
            f"{row.last_in:8.0%} {row.late_by * 1e3:6.3g} ms  {row.place}"
        )
        if row.silent > SILENT_SECONDS:
            line += f" (no news for {row.silent:.0f} s)"
        if row.rank == view.culprit:
            line += "   <- all wait for it"
        lines.append(line)
    return "\n".join(_shorten(lines))


def format_summary(aggregator: Aggregator, seconds: float, step: float = 0.0) -> str:
    """Formats the totals of a job that has ended.

    Args:
        seconds: the time that the totals cover.
        step: seconds of a recent training step; pass 0 if unknown.
    """
    if not aggregator.ranks:
        return NO_SAMPLES
    totals = aggregator.ranks.get(0, RankTotals()).totals
    if not totals.calls:
        return "ringjax summary of rank 0: no calls"
    seconds = max(seconds, 1e-9)
    steps = f", {format_duration(step)} a step" if step else ""
    worst, of_worst = max(aggregator.ranks.items(), key=lambda item: item[1].lost)
    lines = [
        f"ringjax summary of rank 0: {totals.calls} calls in {seconds:.3g} s{steps}",
        f"  waiting for other ranks {totals.waiting / seconds:.1%}",
        f"  moving data             {totals.moving / seconds:.1%}"
        f"{_bandwidth(aggregator)}",
        f"  the slowest was rank {worst}: others waited {of_worst.lost:.3g} s for it",
    ]
    if aggregator.tuned:
        lines.append(f"  autotune: {aggregator.tuned}")
    if totals.exposed:
        exposed = f"  exposed                 {totals.exposed / seconds:.1%}"
        lines.insert(3, f"{exposed}, what overlapping did not hide")
    return "\n".join(lines)


def _bandwidth(aggregator: Aggregator) -> str:
    rates = [r.totals.busbw for r in aggregator.ranks.values() if r.totals.busbw]
    return f", busbw {min(rates) / 1e9:.3g} GB/s" if rates else ""


def format_duration(seconds: float) -> str:
    """Formats a duration with three digits and a unit.

    Example:
        >>> format_duration(0.03184), format_duration(1.5), format_duration(0)
        ('31.8 ms', '1.5 s', '0 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _shorten(lines: Sequence[str]) -> list[str]:
    """Selects the first lines, and of the other lines those that have an arrow."""
    most = _MAX_RANKS + 2
    if len(lines) <= most:
        return list(lines)
    pointed = [line for line in lines[most:] if "<-" in line]
    left = len(lines) - most - len(pointed)
    return [*lines[:most], *pointed, f"      ... and {left} more ranks"]
