"""A time report says how one rank has spent its time since it became a member.

Ranks send reports as lines of JSON, like samples but rarely, and whether or not anybody
watches. `parse_time_report` checks every field, because a rank may run on another host.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ringjax.monitor.sample import checked_number, printable_text

_MAX_METRICS = 16  # most metrics of one progress
_COUNTS = ("step", "total")


@dataclass(slots=True)
class Progress:
    """The values of the program's last call of `ringjax.progress`."""

    step: int = 0
    total: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class TimeReport:
    """Seconds of one rank by what it did. No moment is in two of these fields.

    Attributes:
        age: all seconds since the rank became a member.
        trains: whether the rank has repeated a call, so that there are steps.
        start: from then until all ranks had entered the call that repeats first.
        compile, recompile: compilations by JAX and blocks of `ringjax.time_for`, before
            and after the end of `start`.
        waiting: calls waited for other ranks, after `start`.
        losses: calls waited for a repair, or the training function began again.
        joins: the training function began again because ranks joined or left.
        repeated: the work that was repeated after an error.
        checkpoints, other: the blocks of `ringjax.time_for`, and checkpoints that
            ringjax and orbax have written meanwhile.
        end: the seconds since the last call, only in the last report of a rank.
        last: whether this is the last report of the rank.
        progress: how far the program is; None if it does not say so.
    """

    age: float = 0.0
    trains: bool = False
    start: float = 0.0
    compile: float = 0.0
    recompile: float = 0.0
    waiting: float = 0.0
    losses: float = 0.0
    joins: float = 0.0
    repeated: float = 0.0
    checkpoints: float = 0.0
    other: float = 0.0
    end: float = 0.0
    last: bool = False
    progress: Progress | None = None

    def text(self) -> str:
        """Formats the report as a line of JSON, without the newline.

        Example:
            >>> parse_time_report(TimeReport(age=2.0, start=1.5).text()).start
            1.5
        """
        given = {name: value for name, value in asdict(self).items() if value}
        return json.dumps({"time": given}, separators=(",", ":"))


_PREFIX = b'{"time":'
_SECONDS = [each.name for each in fields(TimeReport) if each.type == "float"]


def is_time_report(line: bytes) -> bool:
    """Returns whether a line of a rank is a time report and not a sample."""
    return line.startswith(_PREFIX)


def parse_time_report(text: str) -> TimeReport:
    """Parses the line that a rank has sent. Raises ValueError if it is no report.

    Example:
        >>> parse_time_report('{"time":{"age":-1}}')
        Traceback (most recent call last):
        ValueError: out of range: -1
    """
    try:
        given = json.loads(text)["time"]
        read: dict[str, Any] = {
            name: checked_number(given.get(name, 0), float) for name in _SECONDS
        }
        read |= {name: given.get(name, False) is True for name in ("trains", "last")}
        read["progress"] = _parse_progress(given.get("progress"))
    except (AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"no report: {error!r:.80}") from None
    return TimeReport(**read)


def _parse_progress(given: Any) -> Progress | None:
    if given is None:
        return None
    metrics = {
        printable_text(name): float(value)
        for name, value in list(given.get("metrics", {}).items())[:_MAX_METRICS]
        if isinstance(value, int | float)
    }
    step, total = (checked_number(given.get(name, 0), int) for name in _COUNTS)
    return Progress(step, total, metrics)
