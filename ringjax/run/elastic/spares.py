"""Spares: processes of an elastic job that are ready, and sleep until a rank is lost.

A spare is a newcomer for which the job has no place yet. The coordinator makes it a
member at the first commit after a loss. This module decides when ringrun starts another
spare, and prints lines about spares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ringjax.run.elastic.elastic_settings import ElasticSettings
from ringjax.run.elastic.worker_slots import WorkerSlots
from ringjax.run.workers import Worker, WorkerTable

MAX_FAILURES = 3  # spares that fail in a row before no more of them are started
GAVE_UP = (
    f"no more spares are started: {MAX_FAILURES} in a row have failed before they were "
    "ready"
)
# Seconds for spares to become members. Then ringrun starts other processes even if the
# members make no commit.
_JOIN_TIMEOUT = 5.0
# Seconds between the join of a spare and the start of the next one, whose imports would
# slow down the first step of the joined rank.
_REFILL_DELAY = 1.0
_EXIT_TIMEOUT = 3.0  # seconds for sleeping spares to end after the last rank has ended


class Spares:
    """The spares of one job. Without `settings.spares` no method has an effect.

    Args:
        slots: the slots of the job, of which spares also need some.
        note: prints a line for the user.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        table: WorkerTable,
        slots: WorkerSlots,
        note: Callable[[str], None],
    ) -> None:
        self._settings, self._table = settings, table
        self._slots, self._note = slots, note
        self._ready: set[int] = set()  # workers about which a line was printed
        self._failures = 0  # spares that have failed one after another
        self._hinted = False  # whether the hint to `warm_up` was printed
        self._gap_since = self._over_since = math.inf
        self._refill_at = -math.inf
        self.ended = not settings.spares

    def mark_new(self, workers: Sequence[Worker]) -> None:
        """Marks those of the workers just added that are more than `max_np`."""
        if not self._settings.spares:
            return
        count = self._table.count_active() - self._settings.max_np
        for worker in workers[len(workers) - min(max(count, 0), len(workers)) :]:
            worker.spare = True

    def wait_for_joins(self, now: float) -> bool:
        """Returns whether spares are about to take the places of all lost members.

        ringrun then starts other processes later, because their imports would slow down
        the ranks that must reach the next commit.
        """
        if not self._settings.spares:
            return False
        missing = self._settings.max_np - self._table.count_members()
        asleep = sum(worker.ready for worker in self._table.spares())
        if self._table.members and 0 < missing <= asleep:
            self._gap_since = min(self._gap_since, now)
            limit = self._gap_since + _JOIN_TIMEOUT
            self._refill_at = min(now + _REFILL_DELAY, limit)
        else:
            self._gap_since = math.inf
        return now < self._refill_at

    def tick(self, now: float, *, silent: bool) -> None:
        """Prints a line about new spares, and determines whether all have ended."""
        if not self._settings.spares:
            return
        workers = [w for w in self._table.workers.values() if w.is_running]
        if self._table.count_members() >= self._settings.max_np:
            for worker in workers:
                self._add_ready(worker, silent)
        if self._table.is_over():
            self._over_since = min(self._over_since, now)
            asleep = any(w.ready and w.rank is None for w in workers)
            self.ended = not asleep or now > self._over_since + _EXIT_TIMEOUT

    def states(self) -> list[tuple[int, str, bool]]:
        """Returns the id and host of each spare, and whether it is ready."""
        spares = self._table.spares()
        return [(w.number, w.slot.host, w.ready) for w in spares]

    def _add_ready(self, worker: Worker, silent: bool) -> None:
        number = worker.number
        idle = worker.ready and worker.rank is None and worker.is_active
        if not idle or worker.dismissed or number in self._ready:
            return
        self._ready.add(number)
        worker.spare, self._failures = True, 0
        if not silent:
            place = self._table.several_hosts()
            self._note(f"{self._table.describe(worker, place=place)} is ready")
            self._hint(worker)

    def _hint(self, worker: Worker) -> None:
        """Says once how a spare can compile before it takes the place of a rank."""
        if worker.cold and not self._hinted:
            self._hinted = True
            self._note(
                "spares compile the step only after they have joined, while the other "
                "ranks wait; call it once in warm_up: "
                "@ringjax.elastic.run(warm_up=function)"
            )

    def record_failure(self, worker: Worker, *, own_fault: bool) -> None:
        """Counts a spare that failed before it was ready. After three, gives up."""
        if not worker.spare or worker.ready or worker.rank is not None or not own_fault:
            return
        self._failures += 1
        if self._failures == MAX_FAILURES:
            self._slots.limit(self._settings.max_np)
            self._note(GAVE_UP)
