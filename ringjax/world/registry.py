"""The process sets that a program has registered: objects by number.

Equal sets share a number; Horovod refuses the second. The ranks behind a number are the
world's matter; here are the objects that programs hold, which must always show the
same. In a job whose ranks come and go, a set of the job that this program has not asked
for yet waits until it does: a newcomer runs the same program, so its first set is the
first.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from ringjax.world.groups import REPLICAS
from ringjax.world.process_set import ProcessSet


class Home(Protocol):
    """What a registry needs of its world."""

    sets: dict[int, list[int]]
    elastic: bool

    def add(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Registers a process set; collective."""

    def remove(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Ends one; collective."""


class Registry:
    """The process sets of one process.

    Args:
        everybody: the set of all ranks, which has number 0.
        replicas: of this process; it has a number in a job of groups.
    """

    def __init__(self, everybody: ProcessSet, replicas: ProcessSet) -> None:
        self._everybody, self._replicas = everybody, replicas
        self._known: dict[int, list[ProcessSet]] = {}
        self._next_id = 1
        self._lock = threading.RLock()  # of the tables; never held while waiting
        self._unclaimed: list[int] = []

    def __contains__(self, number: int | None) -> bool:
        return number in self._known or (
            number is not None and number == self._replicas.process_set_id
        )

    @property
    def next_id(self) -> int:
        """The least number that no set ever had here."""
        return self._next_id

    def begin(self, size: int, replicas: Sequence[int] = ()) -> None:
        """There is a world of so many ranks now, and these are like this process."""
        with self._lock:
            self._everybody.ranks = list(range(size))
            self._known = {0: [self._everybody]}
            self._next_id, self._unclaimed = 1, []
            self._renew_replicas(replicas)

    def _renew_replicas(self, ranks: Sequence[int]) -> None:
        self._replicas.ranks = list(ranks)
        self._replicas.process_set_id = REPLICAS if ranks else None

    def end(self) -> None:
        """There is none any more."""
        with self._lock:
            for equals in self._known.values():
                for process_set in equals:
                    if process_set is not self._everybody:
                        process_set.process_set_id = None
            self._known = {}
            self._everybody.ranks = []
            self._renew_replicas(())

    def renew(
        self,
        size: int,
        sets: Mapping[int, Sequence[int]],
        next_id: int,
        replicas: Sequence[int] = (),
    ) -> None:
        """Other ranks, and numbers of ranks, from now on.

        Args:
            sets: all sets of the job but the world, by number.
            next_id: the least number that none ever had.
            replicas: the ranks at this one's place in their groups.
        """
        with self._lock:
            self._everybody.ranks = list(range(size))
            self._renew_replicas(replicas)
            self._known.setdefault(0, [self._everybody])
            for number in [n for n in self._known if n and n not in sets]:
                for process_set in self._known.pop(number):
                    process_set.process_set_id = None
            for number, equals in self._known.items():
                for process_set in equals:
                    if number:
                        process_set.ranks = list(sets[number])
            new = [n for n in sets if n not in self._known and n >= self._next_id]
            old = [n for n in self._unclaimed if n in sets]
            self._unclaimed = sorted({*old, *new})
            self._next_id = max(self._next_id, next_id, *(n + 1 for n in sets), 1)

    def add(self, process_set: ProcessSet, world: Home) -> ProcessSet:
        """Registers a set whose ranks are those of the world; raises as `Home.add`."""
        with self._lock:
            for number, equals in self._known.items():
                if equals[0].ranks == process_set.ranks:
                    return self._join(number, process_set)
            if self._unclaimed:
                return self._claim(process_set, world)
            number, self._next_id = self._next_id, self._next_id + 1
        world.add(number, process_set.ranks, "add_process_set")
        with self._lock:
            self._known.setdefault(number, [])
            # They may have got other numbers meanwhile.
            process_set.ranks = list(world.sets[number])
            if number in self._unclaimed:
                self._unclaimed.remove(number)
            return self._join(number, process_set)

    def _join(self, number: int, process_set: ProcessSet) -> ProcessSet:
        process_set.process_set_id = number
        equals = self._known[number]
        if not any(known is process_set for known in equals):
            equals.append(process_set)
        return process_set

    def _claim(self, process_set: ProcessSet, world: Home) -> ProcessSet:
        number = self._unclaimed.pop(0)
        process_set.ranks = list(world.sets[number])
        self._known[number] = []
        return self._join(number, process_set)

    def remove(self, process_set: ProcessSet, world: Home) -> bool:
        """Ends a set and all equal ones; False if it is none, or that of all ranks."""
        number = process_set.process_set_id
        if not number or number not in self._known:  # also the replicas
            return False
        world.remove(number, process_set.ranks, "remove_process_set")
        with self._lock:
            for known in self._known.pop(number, []):
                known.process_set_id = None
        return True
