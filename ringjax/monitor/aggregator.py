"""The job as its ranks tell of it: sums of all that ever were, and windows of time.

Ranks come and go, and so do their numbers: what is summed up for rank 3 is what whoever
was rank 3 did meanwhile, so that no sum ever falls. Pure bookkeeping: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ringjax.monitor.sample import CollectiveKey, CollectiveSums, Sample, subtract_sums
from ringjax.monitor.stragglers import LastArrival, Stragglers, StragglerTally
from ringjax.ops import bus_factor

OTHER_SETS = -1  # stands for all process sets beyond the first _MOST_SETS
_MOST_SETS = 32
_MOST_EVENTS = 100
SILENT_SECONDS = 5.0  # seconds without news, from where on it is said


@dataclass(slots=True)
class Share:
    """What one rank has done in all: calls, seconds, bytes over its busiest link."""

    calls: int = 0
    waiting: float = 0.0
    moving: float = 0.0
    exposed: float = 0.0
    bus_bytes: float = 0.0

    def since(self, before: Share) -> Share:
        """Of the time between the two."""
        return Share(
            max(0, self.calls - before.calls),
            max(0.0, self.waiting - before.waiting),
            max(0.0, self.moving - before.moving),
            max(0.0, self.exposed - before.exposed),
            max(0.0, self.bus_bytes - before.bus_bytes),
        )

    def add(self, other: Share) -> None:
        """Adds the other one's numbers."""
        self.calls += other.calls
        self.waiting += other.waiting
        self.moving += other.moving
        self.exposed += other.exposed
        self.bus_bytes += other.bus_bytes


def _share(sample: Sample) -> Share:
    moved = sum(
        one.bytes
        * bus_factor(op, sample.size)
        # `bytes` are the rank's own; the factor is of what it ends up with.
        * (sample.size if op == "allgather" else 1)
        for (op, _, number), one in sample.sums.items()
        if number == 0
    )
    spent = (sample.calls, sample.waiting, sample.moving, sample.exposed)
    return Share(*spent, moved)


@dataclass(slots=True)
class Seen:
    """The last that was heard of a worker, and when."""

    sample: Sample
    share: Share
    when: float


@dataclass(slots=True)
class RankTotals:
    """What was summed up for one rank, whoever that was.

    Attributes:
        last: in how many of the judged calls it came last.
        lost: seconds that the others waited for it, judged by those.
    """

    share: Share = field(default_factory=Share)
    last: int = 0
    lost: float = 0.0


class Window:
    """Some time of the job, for shares and for judgements.

    Attributes:
        began: when, on the clock of whoever feeds the aggregator.
        tally: of its calls.
        base: what each worker had told at its beginning, and when.
    """

    def __init__(self, size: int, seen: dict[int, Seen], now: float) -> None:
        self.begin(size, seen, now)

    def begin(self, size: int, seen: dict[int, Seen], now: float) -> None:
        """Forgets what was."""
        self.began = now
        self.tally = StragglerTally(size)
        self.base = {w: (one.share, one.when) for w, one in seen.items()}

    def since(self, worker: int, seen: Seen) -> tuple[Share, float]:
        """What a worker has done, and in how many seconds."""
        base, began = self.base.get(worker, (seen.share, seen.when))
        return seen.share.since(base), max(seen.when - began, 1e-9)


class Aggregator:
    """Puts together what the ranks tell.

    Attributes:
        epoch, size: the newest membership that somebody told of; 0 ranks: nobody has.
        seen: who runs, by number of the worker; in a static job that is the rank.
        sums: of all workers that ever were, by collective, lane and process set.
        ranks: likewise, by rank.
        events: when something happened, and what.
        joins, losses: of workers, once the job had begun.
        tuned: what autotune has found out, if anything.
    """

    def __init__(self) -> None:
        self.epoch, self.size = -1, 0
        self.workers: dict[int, Seen] = {}
        self.sums: dict[CollectiveKey, CollectiveSums] = {}
        self.ranks: dict[int, RankTotals] = {}
        self.events: list[tuple[float, str]] = []
        self.joins = self.losses = 0
        self.tuned = ""
        self._stragglers = Stragglers(0)
        self._windows: list[Window] = []
        self._sets: list[int] = []

    def add_sample(self, worker: int, sample: Sample, now: float) -> None:
        """A worker has told how it is."""
        if sample.epoch > self.epoch:
            self._follow(sample, now)
        before = self.workers.get(worker)
        share = _share(sample)
        self.workers[worker] = Seen(sample, share, now)
        if sample.rank == 0 and sample.tuned not in ("", self.tuned):
            self.tuned = sample.tuned
            self.add_event(f"autotune: {self.tuned}", now)
        for window in self._windows:
            if worker not in window.base or share.calls < window.base[worker][0].calls:
                window.base[worker] = share, now
        old = Share() if before is None else before.share
        anew = share.calls < old.calls
        of_rank = self.ranks.setdefault(sample.rank, RankTotals())
        of_rank.share.add(share if anew else share.since(old))
        for key, one in subtract_sums(
            sample.sums, {} if before is None else before.sample.sums
        ).items():
            self.sums.setdefault(self._bounded(key), CollectiveSums()).add(one)
        if sample.epoch == self.epoch and sample.rank < self.size:
            judged = self._stragglers.add_waits(sample.rank, sample.waits)
            self._judge(judged, sample.part)

    def _follow(self, sample: Sample, now: float) -> None:
        """A new epoch: numbers of calls begin anew, and ranks are other ones."""
        self.epoch, self.size = sample.epoch, sample.size
        self._stragglers = Stragglers(sample.size)
        for window in self._windows:
            window.begin(sample.size, self.workers, now)

    def _judge(self, calls: Iterable[LastArrival], part: float) -> None:
        for judged in calls:
            of_rank = self.ranks.setdefault(judged.last, RankTotals())
            of_rank.last += 1
            of_rank.lost += judged.behind / part
            for window in self._windows:
                window.tally.add(judged)

    def _bounded(self, key: CollectiveKey) -> CollectiveKey:
        op, named, number = key
        if number not in self._sets:
            if len(self._sets) >= _MOST_SETS:
                return op, named, OTHER_SETS
            self._sets.append(number)
        return key

    def remove_worker(self, worker: int) -> None:
        """A worker has ended; what it did stays in the sums."""
        self.workers.pop(worker, None)

    def add_event(self, text: str, now: float) -> None:
        """Something has happened that people want to know."""
        self.events.append((now, text))
        del self.events[:-_MOST_EVENTS]

    def open_window(self, now: float) -> Window:
        """A window that begins now, until `close`."""
        window = Window(self.size, self.workers, now)
        self._windows.append(window)
        return window

    def restart_window(self, window: Window, now: float) -> None:
        """A window begins anew."""
        window.begin(self.size, self.workers, now)

    def close_window(self, window: Window) -> None:
        """It takes note of nothing any more."""
        self._windows.remove(window)

    def members(self) -> dict[int, tuple[int, Seen]]:
        """Of the present epoch, by rank: the worker, and what was heard of it."""
        return {
            one.sample.rank: (worker, one)
            for worker, one in sorted(self.workers.items())
            if one.sample.epoch == self.epoch and one.sample.rank < self.size
        }
