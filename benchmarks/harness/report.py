"""Tables of text, and the tables of allreduce.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
Row = dict[str, Any]


def bytes_text(size: int) -> str:
    """Formats a number of bytes with a unit."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Formats cells: the first `left` columns are aligned left, other columns right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def spread(values: Sequence[float], digits: int = 1) -> str:
    middle, *ends = statistics.median(values), min(values), max(values)
    low, high = (f"{end:.{digits}f}" for end in ends)
    return f"{middle:.{digits}f} ({low} .. {high})"


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Returns the ratio of each round; above 1 means that ringjax is faster."""
    return [a / b for a, b in zip(theirs, ours, strict=False) if b > 0]


def table(title: str, rows: Sequence[Row]) -> str:
    """Formats the rows of one case."""
    head = "peer,median,p10,p90,algbw,busbw,x ringjax,(min .. max),of limit,foreign"
    lines = [head.split(",")]
    for row in rows:
        extremes = ""
        if row["ratio"] is not None:
            ends = (_number(row[name]) for name in ("ratio_min", "ratio_max"))
            extremes = f"({' .. '.join(ends)})"
        times = (row[name] for name in ("us_median", "us_p10", "us_p90"))
        lines.append(
            [
                f"{row['peer']}: {row['variant']}",
                *(f"{t:.1f}" if t >= 10 else f"{t:.3f}" for t in times),
                *(f"{row[name]:.2f}" for name in ("algbw", "busbw")),
                _number(row["ratio"]),
                extremes,
                *(_number(row[name]) for name in ("share", "foreign")),
            ]
        )
    return f"\n{title}\n{columns(lines)}"


def ratio_table(rows: Sequence[Row]) -> str:
    """Formats the speedup of ringjax's variants over the best variant of each peer."""
    ours = [row for row in rows if row["peer"] == "ringjax"]
    peers = [p for p in (ours[0]["against"] if ours else ()) if p != "ringjax"]
    if not peers:
        return ""
    lines = [["times faster than the best variant of", *peers]]
    for row in ours:
        ratios = (_number(row["against"].get(peer)) for peer in peers)
        lines.append([f"ringjax: {row['variant']}", *ratios])
    return columns(lines)


def counts_table(rows: Iterable[Row]) -> str:
    """Formats the time by number of tensors, with equal total bytes."""
    kept = [row for row in rows if row["counts"]]
    if not kept:
        return ""
    counts = sorted({row["tensors"] for row in kept})
    times: dict[tuple[int, str, str], dict[int, float]] = {}
    for row in kept:
        name = f"{row['peer']}: {row['variant']}"
        key = (row["ranks"], row["dtype"], name)
        times.setdefault(key, {})[row["tensors"]] = row["us_median"]
    total = bytes_text(max(row["size"] for row in kept))
    lines = [["us by tensors", "ranks", "dtype", *map(str, counts), "last/first"]]
    for (ranks, dtype, name), found in times.items():
        cells = [f"{found[n]:.1f}" if n in found else "-" for n in counts]
        ends = [found.get(n) for n in (counts[0], counts[-1])]
        growth = ends[1] / ends[0] if ends[0] and ends[1] else None
        lines.append([name, str(ranks), dtype, *cells, _number(growth)])
    return f"\n{total} in so many tensors, mean\n{columns(lines)}"
