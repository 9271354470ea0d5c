"""ProcessSet: some of the ranks, who run collectives of their own. Horovod's class.

Only the name of a group; its links and its registry are in world.py and runtime/.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

from ringjax.world import timeouts


class Identity:
    """Who this process is; runtime/, which knows it and this module, fills it in.

    Attributes:
        rank: gives the world rank; its argument names the caller in NotInitialized.
    """

    rank: Callable[[str], int]


this_process = Identity()


class ProcessSet:
    """A subset of the ranks, to be given to `init` or `add_process_set`.

    Args:
        ranks: world ranks, each once; they are kept sorted.
        timeout: seconds that calls on this set may wait for its ranks, 0 for ever; None
            as the job has it (RINGJAX_COLLECTIVE_TIMEOUT). Of this rank and this
            object: ranks, and equal sets, may differ. It outlives changes of the
            membership of an elastic job. `ringjax.collective_timeout` is stronger.

    Attributes:
        ranks: the sorted ranks. Those of `global_process_set` are known after `init`.
        process_set_id: its number while it is registered, else None.
        timeout: as given; may be set. Compiled programs keep what it was when they were
            traced.
        mpi_comm: None, as in Horovod for a set that is not made of an MPI communicator.

    Raises:
        ValueError: a rank is negative or given twice, or `timeout` is negative or not a
            number.
        TypeError: a rank is no integer.

    Example:
        >>> ProcessSet([2, 0])
        ProcessSet(process_set_id=None, ranks=[0, 2])
        >>> ProcessSet([0, 1], timeout=5).timeout
        5.0
    """

    mpi_comm: None = None

    def __init__(self, ranks: Iterable[int], timeout: float | None = None) -> None:
        self.process_set_id: int | None = None
        self.ranks = _checked(ranks)
        self.timeout = timeout

    @property
    def timeout(self) -> float | None:
        """Seconds that calls may wait; see the class."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        what = "ProcessSet: timeout"
        self._timeout = None if seconds is None else timeouts.checked(seconds, what)

    def limit(self) -> float:
        """Seconds that a call made now may wait, 0 for ever, -1 as the job has it."""
        return timeouts.now(self._timeout)

    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    def included(self) -> bool:
        """Whether this process is one of them. Raises NotInitialized before `init`."""
        return this_process.rank("ProcessSet.included") in self.ranks

    def rank(self) -> int:
        """This process's rank within the set.

        Raises:
            NotInitialized: before `init`.
            ValueError: this process is not in the set.
        """
        mine = this_process.rank("ProcessSet.rank")
        if mine not in self.ranks:
            raise ValueError(f"rank {mine} is not in {self}")
        return self.ranks.index(mine)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __str__(self) -> str:
        """Horovod's words, which its suites compare."""
        return f"{repr(self)[:-1]}, mpi_comm={self.mpi_comm})"


def _checked(ranks: Iterable[int]) -> list[int]:
    if isinstance(ranks, str | bytes) or not isinstance(ranks, Iterable):
        raise TypeError(f"ranks must be a sequence of integers, not {ranks!r}")
    found = []
    for rank in ranks:
        if isinstance(rank, bool):
            raise TypeError(f"ranks must be integers, not {rank!r}")
        try:
            found.append(operator.index(rank))
        except TypeError:
            raise TypeError(f"ranks must be integers, not {rank!r}") from None
    if any(rank < 0 for rank in found):
        raise ValueError(f"ranks must not be negative: {found}")
    if len(set(found)) != len(found):
        raise ValueError(f"ranks must be given once each: {found}")
    return sorted(found)


global_process_set = ProcessSet(())  # all ranks, after `init`
global_process_set.process_set_id = 0
