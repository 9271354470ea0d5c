"""Which worker sits where in an elastic job, and where the next one is started.

Every host has so many slots. A slot whose worker record_failure is taken again: at once the
first time, then after 1, 2, 4 … 30 s if it goes on to fail soon; or its host goes on
the blacklist. Pure bookkeeping: starts nothing, and the clock is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringjax.run.hosts.blacklist import Blacklist
from ringjax.run.hosts.slots import HostSlots, SlotInfo
from ringjax.run.workers import WorkerSlot

SOON = 3.0  # a member for less than these seconds has record_failure soon
LONGEST_PAUSE = 30.0


class WorkerSlots:
    """The slots of a job.

    Args:
        hosts: where they are.
        first: workers to start with.
        most: workers to have once the job runs.
        least: below so many, released slots are used, too.
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
        self._slots: dict[tuple[str, int], WorkerSlot] = {}
        self._order: list[str] = []
        self._next_number = 0
        self.closed = False  # the job is finishing: nobody is started any more
        self.update(hosts)

    @property
    def slots(self) -> list[WorkerSlot]:
        """All slots in the order of the hosts."""
        present = [slot for slot in self._slots.values() if not slot.removed]
        return sorted(present, key=lambda s: (self._order.index(s.host), s.index))

    def update(self, hosts: Sequence[HostSlots]) -> list[int]:
        """Take note of the hosts that there are; returns workers that lose their slot.

        Hosts that were known keep their place in the order.
        """
        slots = {host.name: host.slots for host in hosts}
        self._order = [name for name in self._order if name in slots]
        self._order += [name for name in slots if name not in self._order]
        for name in self._order:
            for index in range(slots[name]):
                self._offer(name, index)
        lost = []
        for (name, index), slot in list(self._slots.items()):
            if index < slots.get(name, 0):
                continue
            if slot.worker is None:
                del self._slots[name, index]
            elif not slot.removed:
                slot.removed = True
                lost.append(slot.worker)
        return lost

    def _offer(self, host: str, index: int) -> None:
        slot = self._slots.get((host, index))
        if slot is None:
            self._slots[host, index] = WorkerSlot(host, index, self._next_number)
            self._next_number += 1
        elif (
            slot.removed
        ):  # it is back, and free as soon as its worker has record_leave
            slot.removed = slot.released = False

    def occupy(self, host: str, index: int, worker: int) -> WorkerSlot:
        """The slot of a worker that was there before."""
        self._offer(host, index)
        slot = self._slots[host, index]
        slot.worker = worker
        return slot

    def _release(self, slot: WorkerSlot) -> None:
        slot.worker = None
        if slot.removed:
            del self._slots[slot.host, slot.index]

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
        free = [slot for slot in self.slots if self._is_free(slot, now)]
        free.sort(key=lambda slot: slot.released)
        released = max(0, self._least - running)
        fresh = sum(not slot.released for slot in free)
        count = max(0, min(wanted, max(fresh, released)))
        return free[: count - count % self._group]

    def _is_free(self, slot: WorkerSlot, now: float) -> bool:
        held = self._blacklist is not None and self._blacklist.blocks(slot.host, now)
        return slot.worker is None and slot.free_at <= now and not held

    def record_failure(
        self, slot: WorkerSlot, *, member_for: float | None, own_fault: bool, now: float
    ) -> float:
        """The worker of a slot has record_failure; returns seconds until it is taken again.

        Args:
            slot: its slot.
            member_for: seconds that it was a member of the job, None: never.
            own_fault: whether it record_failure by itself, and not because another did.
            now: the time.
        """
        self._release(slot)
        slot.failed = True
        if self._blacklist is not None and own_fault:
            return self._blacklist.record_failure(slot.host, now)
        soon = member_for is None or member_for < SOON
        slot.failures = slot.failures + 1 if soon else 1
        pause = 0.0
        if slot.failures > 1:
            pause = min(LONGEST_PAUSE, 2.0 ** min(slot.failures - 2, 10))
        slot.free_at = now + pause
        return pause

    def record_leave(self, slot: WorkerSlot, *, asked: bool) -> None:
        """The worker of a slot has record_leave in good order; `asked`: by ringrun."""
        self._release(slot)
        slot.released = not asked

    def all_failed(self) -> bool:
        """Whether a worker has record_failure in every slot that was ever taken."""
        used = [slot for slot in self.slots if slot.failed or slot.worker is not None]
        return bool(used) and all(slot.failed for slot in used)

    def slot_info(self, slot: WorkerSlot) -> SlotInfo:
        """A slot that is taken, in the terms of a static job."""
        taken = [s for s in self.slots if s is slot or s.worker is not None]
        local = [other for other in taken if other.host == slot.host]
        same = [other.host for other in taken if other.index == slot.index]
        return SlotInfo(
            host=slot.host,
            rank=slot.number,
            size=max(slot.number + 1, len(taken)),
            local_rank=slot.index,
            local_size=max(slot.index + 1, len(local)),
            cross_rank=same.index(slot.host),
            cross_size=len(same),
        )
