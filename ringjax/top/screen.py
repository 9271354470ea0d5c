"""A job on a terminal, drawn with rich: the table of table.py, in colours.

Imported only where rich is installed and there is a terminal.
"""

from __future__ import annotations

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ringjax.top import table
from ringjax.top.attached import Status

_STYLES = {table.LATE: "bold red", table.SILENT_RANK: "yellow", table.PLAIN: ""}
_EVENTS = 6
_AROUND = 12  # lines of the screen that are not ranks


def picture(status: Status, height: int = 24) -> Panel:
    """What there is to see, for a screen of so many lines."""
    lines = max(1, height - _AROUND - min(_EVENTS, len(status.events)))
    ranks = _ranks(status, lines)
    first, second = table.head(status)
    parts: list[Text | Table] = [Text(first, "bold"), Text(second), ranks]
    if left := len(status.view.rows) - ranks.row_count:
        parts.append(Text(f" ... and {left} more", "dim"))
    if text := table.verdict(status):
        parts.append(Text(text, "bold red"))
    events = Table.grid(padding=(0, 2, 0, 0))
    for ago, text in status.events[-_EVENTS:]:
        events.add_row(Text(f"{table.age(ago):>8} ago", "dim"), text)
    parts.append(events)
    title = Text(f"ringjax top   {status.command}", no_wrap=True, overflow="ellipsis")
    return Panel(Group(*parts), title=title, title_align="left", subtitle="q: quit")


def _ranks(status: Status, most: int) -> Table:
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
    """The whole terminal, for as long as the `with` lasts."""

    def __init__(self) -> None:
        self._console = Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, status: Status) -> None:
        """Draws it anew."""
        height = self._console.size.height
        self._live.update(picture(status, height), refresh=True)
