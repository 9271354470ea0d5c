"""Combines the samples of all ranks into totals since the start and in time windows.

In an elastic job a rank may pass from one process to another. The totals of rank 3 then
add up all processes that were rank 3, each for its time as rank 3, so no total ever
decreases. This module reads no clock and does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from operator import add

from ringjax.monitor.sample import CollectiveKey, CollectiveSums, Sample, subtract_sums
from ringjax.monitor.stragglers import LastArrival, Stragglers, StragglerTally
from ringjax.ops import bus_factor

OTHER_SETS = -1  # the id under which all process sets after _MAX_SETS are combined
_MAX_SETS = 32
_MAX_EVENTS = 100
SILENT_SECONDS = 5.0  # displays mark a rank that has sent no sample for this time


@dataclass(slots=True)
class CallTotals:
    """Totals of the calls of one rank: counts, seconds, bytes over its busiest link.

    `Sample` describes the attributes.
    """

    calls: int = 0
    waiting: float = 0.0
    moving: float = 0.0
    exposed: float = 0.0
    bus_bytes: float = 0.0
    faults: int = 0

    @classmethod
    def of(cls, sample: Sample) -> CallTotals:
        bus_bytes = sum(
            totals.bytes
            * bus_factor(op, sample.size)
            # The factor of allgather refers to the bytes of the result, but a named
            # operation counts the bytes that each rank contributes.
            * (sample.size if (op, lane) == ("allgather", "named") else 1)
            for (op, lane, process_set), totals in sample.sums.items()
            if process_set == 0
        )
        spent = (sample.waiting, sample.moving, sample.exposed)
        return cls(sample.calls, *spent, bus_bytes, sample.faults)

    @property
    def busbw(self) -> float:
        """Bytes per second over the busiest link while data moved; 0 if unknown."""
        return self.bus_bytes / self.moving if self.moving > 1e-6 else 0.0

    def since(self, before: CallTotals) -> CallTotals:
        pairs = zip(astuple(self), astuple(before), strict=True)
        return CallTotals(*(max(now - old, 0) for now, old in pairs))

    def plus(self, other: CallTotals) -> CallTotals:
        return CallTotals(*map(add, astuple(self), astuple(other)))


@dataclass(slots=True)
class LatestSample:
    """The latest sample of a worker, and when it was received."""

    sample: Sample
    totals: CallTotals
    received: float


@dataclass(slots=True)
class RankTotals:
    """Totals of all workers that had one rank.

    Attributes:
        last: in how many calls the rank came last, among the calls that all ranks have
            reported.
        lost: seconds that other ranks have waited for the rank, extrapolated from the
            reported calls to all calls.
    """

    totals: CallTotals = field(default_factory=CallTotals)
    last: int = 0
    lost: float = 0.0


class Window:
    """A time interval, up to now, for which totals are computed.

    Attributes:
        began: the start of the window, on the clock of the caller of `Aggregator`.
        tally: counts how often each rank came last in the calls of the window.
        baseline: for each worker, the totals at the start of the window, and the time
            when these totals were received.
    """

    def __init__(self, size: int, workers: dict[int, LatestSample], now: float) -> None:
        self.restart(size, workers, now)

    def restart(self, size: int, workers: dict[int, LatestSample], now: float) -> None:
        self.began = now
        self.tally = StragglerTally(size)
        self.baseline = {w: (seen.totals, seen.received) for w, seen in workers.items()}

    def since(self, worker: int, latest: LatestSample) -> tuple[CallTotals, float]:
        """Returns a worker's totals in this window, and the seconds that they cover."""
        base, began = self.baseline.get(worker, (latest.totals, latest.received))
        return latest.totals.since(base), max(latest.received - began, 1e-9)


class Aggregator:
    """Combines the samples of all ranks.

    Attributes:
        epoch: the newest epoch of any sample, -1 before the first sample.
        size: the number of ranks in this epoch, 0 before the first sample.
        workers: the current workers by id. In a static job the id is the rank.
        sums: totals of all current and former workers, by collective, lane and process
            set.
        ranks: totals of all current and former workers, by rank.
        events: pairs (time, text) of the last events.
        joins, losses: how many workers joined and were lost after the start.
        spares: triples (worker, host, whether it is ready) of the spares of a job that
            has some; see run/elastic/spares.py.
        tuned: the results of autotune as text, "" without results.
    """

    def __init__(self) -> None:
        self.epoch, self.size = -1, 0
        self.workers: dict[int, LatestSample] = {}
        self.sums: dict[CollectiveKey, CollectiveSums] = {}
        self.ranks: dict[int, RankTotals] = {}
        self.events: list[tuple[float, str]] = []
        self.joins = self.losses = 0
        self.spares: list[tuple[int, str, bool]] | None = None
        self.tuned = ""
        self._stragglers = Stragglers(0)
        self._windows: list[Window] = []
        self._sets: list[int] = []

    def add_sample(self, worker: int, sample: Sample, now: float) -> None:
        if sample.epoch > self.epoch:
            self._begin_epoch(sample, now)
        before = self.workers.get(worker)
        totals = CallTotals.of(sample)
        self.workers[worker] = LatestSample(sample, totals, now)
        if sample.rank == 0 and sample.tuned not in ("", self.tuned):
            self.tuned = sample.tuned
            self.add_event(f"autotune: {self.tuned}", now)
        for window in self._windows:
            base = window.baseline.get(worker)
            if base is None or totals.calls < base[0].calls:
                window.baseline[worker] = totals, now
        old = CallTotals() if before is None else before.totals
        # If the count of calls has decreased, the process has called `init` again, and
        # counts from 0.
        restarted = totals.calls < old.calls
        of_rank = self.ranks.setdefault(sample.rank, RankTotals())
        new_totals = totals if restarted else totals.since(old)
        of_rank.totals = of_rank.totals.plus(new_totals)
        old_sums = {} if before is None else before.sample.sums
        for key, new in subtract_sums(sample.sums, old_sums).items():
            self.sums.setdefault(self._bounded(key), CollectiveSums()).add(new)
        if sample.epoch == self.epoch and sample.rank < self.size:
            arrivals = self._stragglers.add_waits(sample.rank, sample.waits)
            self._count(arrivals, sample.part)

    def _begin_epoch(self, sample: Sample, now: float) -> None:
        # Sequence numbers restart, and ranks pass to other workers, so waits of the
        # previous epoch cannot be compared with waits of this epoch.
        self.epoch, self.size = sample.epoch, sample.size
        self._stragglers = Stragglers(sample.size)
        for window in self._windows:
            window.restart(sample.size, self.workers, now)

    def _count(self, arrivals: Iterable[LastArrival], part: float) -> None:
        for arrival in arrivals:
            of_rank = self.ranks.setdefault(arrival.last, RankTotals())
            of_rank.last += 1
            of_rank.lost += arrival.behind / part
            for window in self._windows:
                window.tally.add(arrival)

    def _bounded(self, key: CollectiveKey) -> CollectiveKey:
        """Replaces the process set by OTHER_SETS if there are too many process sets."""
        op, lane, process_set = key
        if process_set not in self._sets:
            if len(self._sets) >= _MAX_SETS:
                return op, lane, OTHER_SETS
            self._sets.append(process_set)
        return key

    def remove_worker(self, worker: int) -> None:
        """Removes a worker that has ended. The totals still include its calls."""
        self.workers.pop(worker, None)

    def add_event(self, text: str, now: float) -> None:
        self.events.append((now, text))
        del self.events[:-_MAX_EVENTS]

    def open_window(self, now: float) -> Window:
        window = Window(self.size, self.workers, now)
        self._windows.append(window)
        return window

    def restart_window(self, window: Window, now: float) -> None:
        window.restart(self.size, self.workers, now)

    def close_window(self, window: Window) -> None:
        self._windows.remove(window)

    def members(self) -> dict[int, tuple[int, LatestSample]]:
        """Returns the id and the latest sample of each current worker, by rank."""
        return {
            latest.sample.rank: (worker, latest)
            for worker, latest in sorted(self.workers.items())
            if latest.sample.epoch == self.epoch and latest.sample.rank < self.size
        }
