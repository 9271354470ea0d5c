"""Decides when a free slot of an elastic job gets a worker, and blacklists hosts.

After a failure another worker starts in the slot immediately. If the workers of a slot
keep failing soon after they have joined, the next workers start after 1, 2, 4 … 30 s.
If the job uses a blacklist, the host of the slot is put on the list instead. The caller
passes the time and starts the workers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringjax.run.hosts.slots import HostSlots, SlotInfo
from ringjax.run.workers import WorkerSlot

SOON = 3.0  # a worker fails soon if it fails within these seconds as a member
LONGEST_PAUSE = 30.0  # most seconds until another worker starts in a slot


@dataclass(slots=True)
class _BlacklistEntry:
    times: int = 0
    until: float = -math.inf
    announced: bool = True


class Blacklist:
    """The hosts that get no new worker for some time, because a worker failed there.

    The rules are Horovod's. Without a `cooldown` a host stays on the list forever. With
    a cooldown of MIN to MAX seconds a host stays for MIN seconds the first time, then
    twice as long each time, up to MAX seconds. `draw` returns a random number from 0 to
    1, by which the times of hosts differ, so that not all hosts return at the same
    time.

    Example:
        >>> blacklist = Blacklist((10.0, 60.0), draw=lambda: 0.0)
        >>> [blacklist.record_failure("a", now=now) for now in (0.0, 100.0)]
        [10.0, 20.0]
        >>> blacklist.blocks("a", now=119.0), blacklist.blocks("a", now=120.0)
        (True, False)
    """

    def __init__(
        self,
        cooldown: tuple[float, float] | None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._cooldown = cooldown
        self._draw = draw
        self._records: dict[str, _BlacklistEntry] = {}

    def record_failure(self, host: str, now: float) -> float:
        """Puts a host on the list, because a worker failed there.

        All workers of a broken host fail, but count as one failure: failures on a host
        that is on the list already are ignored. Returns the seconds until the job may
        use the host again, which may be infinity.
        """
        record = self._records.setdefault(host, _BlacklistEntry())
        if record.until > now:
            return record.until - now
        record.announced = False
        if self._cooldown is None:
            record.until = math.inf
            return math.inf
        least, most = self._cooldown
        # The host has worked for a long time, so start again with the shortest
        # cooldown.
        if now - record.until > 2 * most:
            record.times = 0
        seconds = least * 2.0 ** min(record.times, 60)
        seconds = min(most, max(least, seconds + least * self._draw()))
        record.times += 1
        record.until = now + seconds
        return seconds

    def blocks(self, host: str, now: float) -> bool:
        record = self._records.get(host)
        return record is not None and record.until > now

    def take_announcement(self, host: str, now: float) -> float | None:
        """Returns, once for each new entry, how long the host stays on the list."""
        record = self._records.get(host)
        if record is None or record.announced:
            return None
        record.announced = True
        return record.until - now


class WorkerSlots:
    """The slots on all hosts of an elastic job.

    Args:
        first: number of workers at the start. most: number of workers to reach while
        the job runs. least: the job uses released slots only if it has fewer workers
        than this. group: number of workers that start together, or not at all.

    Attributes:
        closed: whether the job is finishing, so that no more workers start.
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
        self.closed = False
        self.update(hosts)

    @property
    def slots(self) -> list[WorkerSlot]:
        present = [slot for slot in self._slots.values() if not slot.removed]
        return sorted(present, key=lambda s: (self._order.index(s.host), s.index))

    def update(self, hosts: Sequence[HostSlots]) -> list[int]:
        """Replaces the list of hosts. Hosts that stay keep their position in the order.

        Returns the ids of the workers whose slots do not exist any more.
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
        elif slot.removed:  # the host has returned before the worker has left the slot
            slot.removed = slot.released = False

    def occupy(self, host: str, index: int, worker: int) -> WorkerSlot:
        """Assigns a slot to a worker of an earlier ringrun, and returns the slot."""
        self._offer(host, index)
        slot = self._slots[host, index]
        slot.worker = worker
        return slot

    def _release(self, slot: WorkerSlot) -> None:
        slot.worker = None
        if slot.removed:
            del self._slots[slot.host, slot.index]

    def grow(self) -> None:
        """Allows up to `most` workers from now on, because the job has begun."""
        self._target = self._most

    def limit(self, most: int) -> None:
        """Allows at most `most` workers from now on. Present workers stay."""
        self._target = self._most = most

    def vacant(self, running: int, now: float) -> list[WorkerSlot]:
        """Returns the slots in which the caller must start workers now.

        Slots of one host are consecutive, so that a group spreads over few hosts.
        `running` is the number of workers that run already.
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
        """Releases the slot of a worker that has failed.

        Args:
            member_for: seconds for which the worker was a member, if it ever was one.
            own_fault: whether the worker failed by itself, and not because another
                worker failed.

        Returns:
            Seconds until another worker may start in the slot.
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
        """Releases the slot of a worker that has left without an error.

        If a program other than ringrun has `asked` the worker to leave, that program
        may need the slot. Then the job uses the slot again only if it has too few
        workers.
        """
        self._release(slot)
        slot.released = not asked

    def all_failed(self) -> bool:
        """Returns whether workers have failed in all slots that ever had a worker."""
        used = [slot for slot in self.slots if slot.failed or slot.worker is not None]
        return bool(used) and all(slot.failed for slot in used)

    def slot_info(self, slot: WorkerSlot) -> SlotInfo:
        """Returns ranks and sizes for a slot's worker, computed as in a static job."""
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
