"""Formats the status of a job as lines of text, for 80 columns or more.

`ringjax top` prints these lines. With rich, screen.py shows the cells of the table.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from ringjax.monitor.aggregator import SILENT_SECONDS
from ringjax.monitor.job_time import PROGRESS, format_goodput
from ringjax.monitor.report import format_duration
from ringjax.monitor.view import RankView
from ringjax.top.job_connection import JobStatus

WIDTH = 80
_UNITS = ("B", "K", "M", "G", "T", "P")
LATE, SILENT_RANK, PLAIN = "late", "silent", ""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of the table of ranks. The last column fills the rest of the width."""

    head: str
    width: int
    left: bool = False


COLUMNS = (
    TableColumn("rank", 4),
    TableColumn("host", 10, left=True),
    TableColumn("waits", 5),
    TableColumn("moves", 5),
    TableColumn("last in", 7),
    TableColumn("late by", 7),
    TableColumn("GB/s", 5),
    TableColumn("mem", 5),
    TableColumn("at", 20, left=True),
)


def size(count: float) -> str:
    """Formats a number of bytes in at most five characters.

    Example:
        >>> size(66019328), size(512), size(1.5e12)
        ('63M', '512B', '1.4T')
    """
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    digits = 1 if unit and count < 10 else 0
    return f"{count:.{digits}f}{_UNITS[unit]}"


def share(part: float) -> str:
    return f"{part:.0%}"


def age(seconds: float) -> str:
    """Formats seconds as hours, minutes and seconds.

    Example:
        >>> age(3725), age(59.7)
        ('1:02:05', '0:59')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def cells(row: RankView) -> list[str]:
    """Formats the statistics of a rank as one text per column."""
    late = format_duration(row.late_by) if row.late_by else "-"
    speed = f"{row.busbw / 1e9:.3g}" if row.busbw else "-"
    place = row.place.rpartition(" in ")[0] or row.place
    silent = row.silent > SILENT_SECONDS
    return [
        str(row.rank),
        row.host,
        share(row.waits),
        share(row.moves),
        share(row.last_in),
        late.replace(" ", ""),
        speed,
        size(row.memory),
        f"no news for {age(row.silent)}" if silent else place,
    ]


def kind(row: RankView, status: JobStatus) -> str:
    """Returns LATE if all ranks wait for this rank, else SILENT_RANK or PLAIN."""
    if row.rank == status.view.culprit:
        return LATE
    return SILENT_RANK if row.silent > SILENT_SECONDS else PLAIN


def head(status: JobStatus) -> list[str]:
    """Returns two lines about the whole job."""
    view = status.view
    hosts = "1 host" if view.hosts == 1 else f"{view.hosts} hosts"
    if view.fabric and view.hosts > 1:
        hosts += f" over {view.fabric}"
    parts = [f"job {status.pid}", f"{view.size} ranks on {hosts}"]
    if status.elastic:
        parts.append(f"epoch {max(view.epoch, 0)}")
        parts.append(f"{status.joins} joined, {status.losses} lost")
    parts.append(f"up {age(status.seconds)}")
    rates = [f"{view.rate:.3g} calls/s"]
    if view.step:
        rates = [f"{1 / view.step:.3g} steps/s ({format_duration(view.step)})", *rates]
    if rows := view.rows:
        waits = sum(row.waits for row in rows) / len(rows)
        moves = sum(row.moves for row in rows) / len(rows)
        rates.append(f"waits {share(waits)}, moves {share(moves)}")
    if view.busbw:
        rates.append(f"busbw {view.busbw / 1e9:.3g} GB/s")
    return ["   ".join(parts), "  ".join(rates)]


def goodput_text(status: JobStatus) -> str:
    """Says where the job's time has gone, or returns "" if no rank trains yet."""
    known = PROGRESS in status.shares
    return format_goodput(status.shares, status.seconds) if known else ""


def chosen(status: JobStatus, most: int) -> list[RankView]:
    """Selects up to `most` ranks. Late, silent and often last ranks have priority."""
    rows = status.view.rows
    if len(rows) <= most:
        return rows
    order = sorted(rows, key=lambda row: (not kind(row, status), -row.last_in))
    return sorted(order[:most], key=lambda row: row.rank)


def straggler_text(status: JobStatus) -> str:
    """Describes the rank for which all other ranks wait, or returns ""."""
    for row in status.view.rows:
        if row.rank == status.view.culprit:
            where = f", {row.place}" if row.place else ""
            return (
                f"all wait for rank {row.rank}: last in {share(row.last_in)} of the "
                f"calls, {format_duration(row.late_by)} late{where}"
            )
    return ""


def spares_text(status: JobStatus) -> str:
    """Names the processes that wait until a rank is lost, or returns ""."""
    if not status.spares:
        return ""
    parts = [
        f"worker {worker} on {host} {'sleeps' if ready else 'starts'}"
        for worker, host, ready in status.spares
    ]
    return f"spare{'s' * (len(parts) > 1)}: {', '.join(parts)}"


def lines(status: JobStatus, width: int = WIDTH, most: int = 1 << 20) -> Iterator[str]:
    """Yields all lines, each up to `width` characters, for up to `most` ranks."""
    for line in head(status):
        yield line[:width]
    yield from textwrap.wrap(goodput_text(status), width)
    yield ""
    if not status.view.rows:
        yield "no rank has told anything yet"
    else:
        yield _line([column.head for column in COLUMNS], width)
    rows = chosen(status, most)
    for row in rows:
        mark = {LATE: " <-", SILENT_RANK: " ?", PLAIN: ""}[kind(row, status)]
        yield _line(cells(row), width - len(mark)) + mark
    if left := len(status.view.rows) - len(rows):
        yield f"     ... and {left} more"
    yield from textwrap.wrap(spares_text(status), width)
    if text := straggler_text(status):
        yield ""
        yield from textwrap.wrap(text, width)
    if status.events:
        yield ""
    for ago, text in status.events:
        when = f"{age(ago):>8} ago  "
        yield from textwrap.wrap(when + text, width, subsequent_indent=" " * len(when))


def _line(texts: list[str], width: int) -> str:
    parts: list[str] = []
    for column, text in zip(COLUMNS, texts, strict=True):
        room = column.width
        if column is COLUMNS[-1]:
            room = max(width - sum(len(part) + 1 for part in parts), 0)
        text = text[:room]
        parts.append(text.ljust(room) if column.left else text.rjust(room))
    return " ".join(parts).rstrip()[:width]
