"""A window of time in numbers that mean something to people, rank by rank.

`report` prints it, ringrun's metrics and `ringjax top` show it. `aggregator` collects
the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ringjax.monitor import locations
from ringjax.monitor.aggregator import Aggregator, Share, Window


@dataclass(slots=True)
class RankRow:
    """One rank.

    Attributes:
        waits, moves: shares of the time in which some call waited, or moved data.
        last_in: share of the calls in which it came last.
        late_by: seconds that it was late then, usually.
        busbw: bytes a second over its busiest link while data moved; 0: unknown.
        memory: bytes of its process.
        silent: seconds since it should have told something.
    """

    rank: int
    worker: int
    host: str = ""
    waits: float = 0.0
    moves: float = 0.0
    last_in: float = 0.0
    late_by: float = 0.0
    busbw: float = 0.0
    memory: int = 0
    place: str = ""
    silent: float = 0.0


@dataclass(slots=True)
class View:
    """The job in a window.

    Attributes:
        seconds: how long the window is.
        rate: calls a second, of the busiest rank.
        step: seconds from step to step, 0: unknown.
        culprit: the rank that all wait for, None: there is none.
    """

    seconds: float
    epoch: int = 0
    size: int = 0
    hosts: int = 0
    rate: float = 0.0
    step: float = 0.0
    busbw: float = 0.0
    culprit: int | None = None
    rows: list[RankRow] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """As plain objects."""
        return asdict(self)


def view_from_message(message: Mapping[str, Any]) -> View:
    """What `View.message` has made; of names that are not known, nothing.

    Raises:
        ValueError, TypeError: it is none.

    Example:
        >>> view_from_message(View(2.0, rows=[RankRow(0, 0)]).message()).rows[0].rank
        0
    """
    rows = [RankRow(**_known(RankRow, row)) for row in message.get("rows", [])]
    return View(**{**_known(View, message), "rows": rows})


def _known(kind: type, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"no {kind.__name__}: {given!r:.40}")
    names = {one.name for one in fields(kind)}
    return {name: value for name, value in given.items() if name in names}


def make_view(
    aggregator: Aggregator, window: Window, now: float, every: float = 0.0
) -> View:
    """What the aggregator says about a window that is still open.

    Args:
        every: seconds from one word of a rank to the next one.
    """
    import statistics  # rarely needed, and ringrun is to start in a moment

    seconds = max(now - window.began, 1e-9)
    tally, rows = window.tally, []
    rates, speeds, steps, parts = [0.0], [], [], [1.0]
    members = aggregator.members()
    apart = locations.distinctive_locations(
        {r: seen.sample.place for r, (_, seen) in members.items()}
    )
    for rank, (worker, seen) in sorted(members.items()):
        share, spent = window.since(worker, seen)
        sample, late = seen.sample, tally.late[rank]
        rates.append(share.calls / spent)
        speeds.append(_busbw(share))
        parts.append(sample.part)
        if sample.step:
            steps.append(sample.step)
        rows.append(
            RankRow(
                rank,
                worker,
                host=sample.host,
                waits=min(share.waiting / spent, 1.0),
                moves=min(share.moving / spent, 1.0),
                last_in=late.times / tally.calls if tally.calls else 0.0,
                late_by=late.typical,
                busbw=speeds[-1],
                memory=sample.memory,
                place=apart[rank],
                silent=max(0.0, now - seen.when - every),
            )
        )
    return View(
        seconds,
        epoch=aggregator.epoch,
        size=aggregator.size,
        hosts=len({row.host for row in rows}),
        rate=max(rates),
        step=statistics.median(steps) if steps else 0.0,
        busbw=min(filter(None, speeds), default=0.0),
        culprit=tally.straggler(seconds * min(parts)),
        rows=rows,
    )


def _busbw(share: Share) -> float:
    return share.bus_bytes / share.moving if share.moving > 1e-6 else 0.0
