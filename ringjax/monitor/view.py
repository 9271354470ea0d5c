"""A view has the statistics of each rank in one time window, to show them to users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ringjax.monitor import locations
from ringjax.monitor.aggregator import Aggregator, Window


@dataclass(slots=True)
class RankView:
    """The statistics of one rank in a window.

    Attributes:
        waits: the share of the time in which at least one call waited for other ranks.
        moves: the share of the time in which at least one call moved data.
        last_in: the share of the calls in which the rank came last.
        late_by: the median delay in the calls in which the rank came last, in seconds.
        busbw: bytes per second over the rank's busiest link while data moved; 0 if
            unknown.
        memory: resident bytes of the process.
        place: the line of code where the rank spends more time than other ranks.
        silent: seconds by which the rank's next sample is overdue.
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
    """The statistics of a job in a window.

    Attributes:
        seconds: the length of the window.
        rate: calls per second of the rank with most calls.
        step: seconds of a training step; 0 if unknown.
        busbw: the least `busbw` of all ranks.
        culprit: the rank for which all other ranks wait, or None.
        fabric: the provider of libfabric between the hosts; "" if there is none.
    """

    seconds: float
    epoch: int = 0
    size: int = 0
    hosts: int = 0
    rate: float = 0.0
    step: float = 0.0
    busbw: float = 0.0
    culprit: int | None = None
    rows: list[RankView] = field(default_factory=list)
    fabric: str = ""

    def message(self) -> dict[str, Any]:
        """Converts the view to values that JSON can hold."""
        return asdict(self)


def view_from_message(message: Mapping[str, Any]) -> View:
    """Parses the result of `View.message`. Ignores fields that this version lacks.

    Raises:
        ValueError, TypeError: `message` is no view.

    Example:
        >>> view_from_message(View(2.0, rows=[RankView(0, 0)]).message()).rows[0].rank
        0
    """
    rows = [RankView(**_known(RankView, row)) for row in message.get("rows", [])]
    return View(**{**_known(View, message), "rows": rows})


def _known(kind: type[RankView | View], message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"no {kind.__name__}: {message!r:.40}")
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in message.items() if name in names}


def make_view(
    aggregator: Aggregator, window: Window, now: float, every: float = 0.0
) -> View:
    """Computes the statistics of a window. `every` is the seconds between samples."""
    import statistics  # slow to import, and only jobs with a view need it

    seconds = max(now - window.began, 1e-9)
    tally, rows = window.tally, []
    rates, speeds, steps, parts = [0.0], [], [], [1.0]
    members = aggregator.members()
    places = {rank: latest.sample.place for rank, (_, latest) in members.items()}
    distinctive = locations.distinctive_locations(places)
    for rank, (worker, latest) in sorted(members.items()):
        totals, spent = window.since(worker, latest)
        sample = latest.sample
        rates.append(totals.calls / spent)
        speeds.append(totals.busbw)
        parts.append(sample.part)
        if sample.step:
            steps.append(sample.step)
        rows.append(
            RankView(
                rank,
                worker,
                host=sample.host,
                waits=min(totals.waiting / spent, 1.0),
                moves=min(totals.moving / spent, 1.0),
                last_in=len(tally.delays[rank]) / max(tally.calls, 1),
                late_by=tally.typical_delay(rank),
                busbw=speeds[-1],
                memory=sample.memory,
                place=distinctive[rank],
                silent=max(0.0, now - latest.received - every),
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
        # The tally covers the fraction `part` of the calls, so scale the time, too.
        culprit=tally.straggler(seconds * min(parts)),
        rows=rows,
        fabric=next((latest.sample.fabric for _, latest in members.values()), ""),
    )
