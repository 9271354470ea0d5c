"""Registry of the process sets that a program has added: `ProcessSet` objects by id.

Sets with the same ranks share an id, while Horovod refuses the second set. The objects
belong to the program and must always show the current ranks and id; the communicators
of a set belong to the world.

In an elastic job, a newcomer runs the same program as the members, so it adds the sets
that the members have added, in the same order. A set of the job that the newcomer has
not added yet is *unclaimed*: the next `add_process_set` claims the unclaimed set with
the lowest id.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from ringjax.world.communicator_ids import REPLICA_SET
from ringjax.world.process_set import ProcessSet


class ProcessSetBackend(Protocol):
    """The methods of `World` that connect and close process sets."""

    sets: dict[int, list[int]]

    def add(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Connects a process set. All ranks of the world must call it."""

    def remove(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Closes a process set. All ranks of the world must call it."""


class Registry:
    """The process sets of this process.

    Two sets always exist: `everybody`, the set of all ranks, and `replicas`, the
    replica set of this process, which has an id only in a job of groups.
    """

    def __init__(self, everybody: ProcessSet, replicas: ProcessSet) -> None:
        self._everybody, self._replicas = everybody, replicas
        self._by_id: dict[int, list[ProcessSet]] = {}
        self._next_id = 1
        self._lock = threading.RLock()  # guards the tables; never held during a wait
        self._unclaimed: list[int] = []

    def __contains__(self, number: int | None) -> bool:
        return number in self._by_id or (
            number is not None and number == self._replicas.process_set_id
        )

    @property
    def next_id(self) -> int:
        """The lowest id that no process set of this job has ever had."""
        return self._next_id

    def reset(self, size: int) -> None:
        """Keeps only the set of all ranks, for a new world of `size` ranks."""
        with self._lock:
            self._everybody.ranks = list(range(size))
            self._by_id = {0: [self._everybody]}
            self._next_id, self._unclaimed = 1, []
            self._set_replicas(())

    def _set_replicas(self, ranks: Sequence[int]) -> None:
        self._replicas.ranks = list(ranks)
        self._replicas.process_set_id = REPLICA_SET if ranks else None

    def clear(self) -> None:
        """Removes all process sets when a world ends."""
        with self._lock:
            for equal_sets in self._by_id.values():
                for process_set in equal_sets:
                    if process_set is not self._everybody:
                        process_set.process_set_id = None
            self._by_id = {}
            self._everybody.ranks = []
            self._set_replicas(())

    def update(
        self,
        size: int,
        sets: Mapping[int, Sequence[int]],
        next_id: int,
        replicas: Sequence[int] = (),
    ) -> None:
        """Updates the ranks of all sets, because a new epoch renumbers the ranks.

        `sets` has the ranks of all sets of the job except the world, by id. `next_id`
        is the lowest id that no set has ever had, and `replicas` has the ranks of this
        process's replica set.
        """
        ranks_of = {0: range(size), **sets}
        with self._lock:
            self._set_replicas(replicas)
            self._by_id.setdefault(0, [self._everybody])
            for number in self._by_id.keys() - ranks_of.keys():
                for process_set in self._by_id.pop(number):
                    process_set.process_set_id = None
            for number, equal_sets in self._by_id.items():
                for process_set in equal_sets:
                    process_set.ranks = list(ranks_of[number])
            new = [n for n in sets if n not in self._by_id and n >= self._next_id]
            old = [n for n in self._unclaimed if n in sets]
            self._unclaimed = sorted({*old, *new})
            self._next_id = max(self._next_id, next_id, *(n + 1 for n in sets), 1)

    def add(self, process_set: ProcessSet, world: ProcessSetBackend) -> ProcessSet:
        """Registers a set of existing ranks. All ranks of the world must call this."""
        with self._lock:
            for number, equal_sets in self._by_id.items():
                if equal_sets[0].ranks == process_set.ranks:
                    return self._assign(number, process_set)
            if self._unclaimed:
                number = self._unclaimed.pop(0)
                process_set.ranks = list(world.sets[number])
                self._by_id[number] = []
                return self._assign(number, process_set)
            number, self._next_id = self._next_id, self._next_id + 1
        world.add(number, process_set.ranks, "add_process_set")
        with self._lock:
            self._by_id.setdefault(number, [])
            # A new epoch may have begun in `world.add` and renumbered the ranks.
            process_set.ranks = list(world.sets[number])
            if number in self._unclaimed:
                self._unclaimed.remove(number)
            return self._assign(number, process_set)

    def _assign(self, number: int, process_set: ProcessSet) -> ProcessSet:
        process_set.process_set_id = number
        equal_sets = self._by_id[number]
        if not any(known is process_set for known in equal_sets):
            equal_sets.append(process_set)
        return process_set

    def remove(self, process_set: ProcessSet, world: ProcessSetBackend) -> bool:
        """Removes a set and all equal sets. Returns False if it cannot be removed."""
        number = process_set.process_set_id
        if not number or number not in self._by_id:
            return False
        world.remove(number, process_set.ranks, "remove_process_set")
        with self._lock:
            for known in self._by_id.pop(number, []):
                known.process_set_id = None
        return True
