"""Which worker sits where in an elastic job, and where the next one is started.

Every host has so many seats. A seat whose worker failed is taken again: at once the
first time, then after 1, 2, 4 … 30 s if it goes on to fail soon; or its host goes on
the blacklist. Pure bookkeeping: starts nothing, and the clock is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringjax.run.hosts.blacklist import Blacklist
from ringjax.run.hosts.slots import HostSlots, SlotInfo
from ringjax.run.workers import WorkerSlot

SOON = 3.0  # a member for less than these seconds has failed soon
LONGEST_PAUSE = 30.0


class WorkerSlots:
    """The seats of a job.

    Args:
        hosts: where they are.
        first: workers to start with.
        most: workers to have once the job runs.
        least: below so many, released seats are used, too.
        blacklist: None: hosts are not held to account.
        group: so many workers are started at once, or none.
    """

    def __init__(
        self,
        hosts: Sequence[HostSlots],
        *,
        first: int,
        most: int,
        least: int,
        blacklist: Blacklist | None,
        group: int = 1,
    ) -> None:
        self._most, self._group = most, group
        self._target = min(first, most)
        self._least = least
        self._blacklist = blacklist
        self._seats: dict[tuple[str, int], WorkerSlot] = {}
        self._order: list[str] = []
        self._numbers = 0
        self.closed = False  # the job is finishing: nobody is started any more
        self.update(hosts)

    @property
    def seats(self) -> list[WorkerSlot]:
        """All seats in the order of the hosts."""
        present = [seat for seat in self._seats.values() if not seat.gone]
        return sorted(present, key=lambda s: (self._order.index(s.host), s.index))

    def update(self, hosts: Sequence[HostSlots]) -> list[int]:
        """Take note of the hosts that there are; returns workers that lose their seat.

        Hosts that were known keep their place in the order.
        """
        slots = {host.name: host.slots for host in hosts}
        self._order = [name for name in self._order if name in slots]
        self._order += [name for name in slots if name not in self._order]
        for name in self._order:
            for index in range(slots[name]):
                self._offer(name, index)
        lost = []
        for (name, index), seat in list(self._seats.items()):
            if index < slots.get(name, 0):
                continue
            if seat.worker is None:
                del self._seats[name, index]
            elif not seat.gone:
                seat.gone = True
                lost.append(seat.worker)
        return lost

    def _offer(self, host: str, index: int) -> None:
        seat = self._seats.get((host, index))
        if seat is None:
            self._seats[host, index] = WorkerSlot(host, index, self._numbers)
            self._numbers += 1
        elif seat.gone:  # it is back, and free as soon as its worker has left
            seat.gone = seat.released = False

    def occupy(self, host: str, index: int, worker: int) -> WorkerSlot:
        """The seat of a worker that was there before."""
        self._offer(host, index)
        seat = self._seats[host, index]
        seat.worker = worker
        return seat

    def _vacate(self, seat: WorkerSlot) -> None:
        seat.worker = None
        if seat.gone:
            del self._seats[seat.host, seat.index]

    def grow(self) -> None:
        """The job runs: from now on it may have as many workers as it can get."""
        self._target = self._most

    def vacant(self, running: int, now: float) -> list[WorkerSlot]:
        """Seats in which a worker is to be started now, if so many run already.

        Seats of one host come one after the other: a group has as few hosts as can be.
        """
        if self.closed:
            return []
        wanted = self._target - running
        free = [seat for seat in self.seats if self._is_free(seat, now)]
        free.sort(key=lambda seat: seat.released)
        released = max(0, self._least - running)
        fresh = sum(not seat.released for seat in free)
        count = max(0, min(wanted, max(fresh, released)))
        return free[: count - count % self._group]

    def _is_free(self, seat: WorkerSlot, now: float) -> bool:
        held = self._blacklist is not None and self._blacklist.holds(seat.host, now)
        return seat.worker is None and seat.since <= now and not held

    def failed(
        self, seat: WorkerSlot, *, member_for: float | None, own_fault: bool, now: float
    ) -> float:
        """The worker of a seat has failed; returns seconds until it is taken again.

        Args:
            seat: its seat.
            member_for: seconds that it was a member of the job, None: never.
            own_fault: whether it failed by itself, and not because another did.
            now: the time.
        """
        self._vacate(seat)
        seat.failed = True
        if self._blacklist is not None and own_fault:
            return self._blacklist.failed(seat.host, now)
        soon = member_for is None or member_for < SOON
        seat.failures = seat.failures + 1 if soon else 1
        pause = 0.0
        if seat.failures > 1:
            pause = min(LONGEST_PAUSE, 2.0 ** min(seat.failures - 2, 10))
        seat.since = now + pause
        return pause

    def left(self, seat: WorkerSlot, *, asked: bool) -> None:
        """The worker of a seat has left in good order; `asked`: by ringrun."""
        self._vacate(seat)
        seat.released = not asked

    def all_failed(self) -> bool:
        """Whether a worker has failed in every seat that was ever taken."""
        used = [seat for seat in self.seats if seat.failed or seat.worker is not None]
        return bool(used) and all(seat.failed for seat in used)

    def slot(self, seat: WorkerSlot) -> SlotInfo:
        """A seat that is taken, in the terms of a static job."""
        taken = [s for s in self.seats if s is seat or s.worker is not None]
        local = [other for other in taken if other.host == seat.host]
        same = [other.host for other in taken if other.index == seat.index]
        return SlotInfo(
            host=seat.host,
            rank=seat.number,
            size=max(seat.number + 1, len(taken)),
            local_rank=seat.index,
            local_size=max(seat.index + 1, len(local)),
            cross_rank=same.index(seat.host),
            cross_size=len(same),
        )
