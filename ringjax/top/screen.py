"""Draws the status of a job on a terminal with rich: the table of table.py, in color.

cli.py imports this module only if rich is installed and the output is a terminal.
"""

from __future__ import annotations

import textwrap

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ringjax.top import table
from ringjax.top.job_connection import JobStatus

_STYLES = {table.LATE: "bold red", table.SILENT_RANK: "yellow", table.PLAIN: ""}
_FRAME_LINES = 13  # lines of the screen that show neither ranks nor events
_EVENT_COLUMNS = 17  # columns for the frame and the age of an event, left of its text


def picture(status: JobStatus, width: int = table.WIDTH, height: int = 24) -> Panel:
    """Draws a status on a screen of `width` columns and `height` lines."""
    events, taken = _events(
        status, width, max(0, min(height // 3, height - _FRAME_LINES))
    )
    spares = table.spares_text(status) if height > _FRAME_LINES + 1 else ""
    taken += bool(spares)
    ranks = _ranks(status, max(1, height - _FRAME_LINES - taken))
    first, second = (_line(text) for text in table.head(status))
    first.stylize("bold")
    parts: list[Text | Table] = [first, second, ranks]
    if left := len(status.view.rows) - ranks.row_count:
        parts.append(Text(f" ... and {left} more", "dim"))
    if spares:
        parts.append(_line(spares))
    if text := table.goodput_text(status):
        parts.append(_line(text))
    if text := table.straggler_text(status):
        parts.append(Text(text[: 2 * (width - 4)], "bold red"))
    if events.row_count:
        parts.append(events)
    title = _line(f"ringjax top   {status.command}")
    return Panel(Group(*parts), title=title, title_align="left", subtitle="q: quit")


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _events(status: JobStatus, width: int, most: int) -> tuple[Table, int]:
    """Draws the latest events that fit into `most` lines, and counts their lines."""
    shown: list[tuple[str, str]] = []
    taken = 0
    for ago, text in reversed(status.events):
        lines = len(textwrap.wrap(text, max(10, width - _EVENT_COLUMNS)))
        if taken + lines > most:
            break
        taken += lines
        shown.insert(0, (f"{table.age(ago):>8} ago", text))
    events = Table.grid(padding=(0, 1, 0, 0))
    events.add_column(style="dim", no_wrap=True)
    for row in shown:
        events.add_row(*row)
    return events, taken


def _ranks(status: JobStatus, most: int) -> Table:
    found = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=True, pad_edge=False
    )
    for column in table.COLUMNS:
        last = column is table.COLUMNS[-1]
        found.add_column(
            column.head,
            justify="left" if column.left else "right",
            ratio=1 if last else None,
            max_width=None if last else column.width,
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in table.chosen(status, most):
        style = _STYLES[table.kind(row, status)]
        found.add_row(*map(Text, table.cells(row)), style=style)
    return found


class Screen:
    """Uses the whole terminal to show statuses, inside of a `with` statement."""

    def __init__(self) -> None:
        self._console = Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, status: JobStatus) -> None:
        width, height = self._console.size
        self._live.update(picture(status, width, height), refresh=True)
