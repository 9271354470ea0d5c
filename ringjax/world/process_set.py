"""ProcessSet: a subset of the ranks with its own collectives, as in Horovod.

A `ProcessSet` only lists ranks. world.py creates the communicators of a set, and
runtime/ registers sets.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

from ringjax.world import timeouts


def _not_set(what: str) -> int:
    raise AssertionError(f"{what}: ringjax.runtime has not been imported")


# Returns the rank of this process. The argument names the caller in errors.
# `runtime.lifecycle` sets this function, because this module must not import runtime/.
rank_of_process: Callable[[str], int] = _not_set


class ProcessSet:
    """A subset of the ranks, for `init`, `add_process_set` and all collectives.

    Args:
        ranks: ranks of the world, each once, in any order.
        timeout: seconds that calls on this set may wait for other ranks, 0 for no
            limit, None for the job's limit (RINGJAX_COLLECTIVE_TIMEOUT). The limit
            belongs to this object on this rank: other ranks, and equal sets, may have
            other limits. The limit survives when the members of an elastic job change.
            A limit of `ringjax.collective_timeout` overrides it.

    Attributes:
        ranks: the sorted ranks. `global_process_set.ranks` is empty before `init`.
        process_set_id: the id of the set while it is registered, otherwise None.
        timeout: the limit in seconds, which may be changed. A compiled program keeps
            the limit of the moment when it was traced.
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
        self.ranks = _checked_ranks(ranks)
        self.timeout = timeout

    @property
    def timeout(self) -> float | None:
        """Seconds that calls on this set may wait for other ranks; see `ProcessSet`."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        what = "ProcessSet: timeout"
        self._timeout = (
            None if seconds is None else timeouts.checked_limit(seconds, what)
        )

    def limit(self) -> float:
        """Returns the limit in seconds that applies to a call now.

        Returns:
            0 for no limit, -1 for the job's limit.
        """
        return timeouts.current_limit(self._timeout)

    def size(self) -> int:
        """Returns the number of ranks in the set."""
        return len(self.ranks)

    def included(self) -> bool:
        """Returns whether this process is in the set.

        Raises:
            NotInitialized: `init` has not been called.
        """
        return rank_of_process("ProcessSet.included") in self.ranks

    def rank(self) -> int:
        """Returns the rank of this process within the set.

        Raises:
            NotInitialized: `init` has not been called.
            ValueError: this process is not in the set.
        """
        world_rank = rank_of_process("ProcessSet.rank")
        if world_rank not in self.ranks:
            raise ValueError(f"rank {world_rank} is not in {self}")
        return self.ranks.index(world_rank)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __str__(self) -> str:
        """Returns the same text as Horovod, because Horovod's tests compare it."""
        return f"{repr(self)[:-1]}, mpi_comm={self.mpi_comm})"


def _checked_ranks(ranks: Iterable[int]) -> list[int]:
    if isinstance(ranks, str | bytes) or not isinstance(ranks, Iterable):
        raise TypeError(f"ranks must be a sequence of integers, not {ranks!r}")
    checked = []
    for rank in ranks:
        if isinstance(rank, bool):
            raise TypeError(f"ranks must be integers, not {rank!r}")
        try:
            checked.append(operator.index(rank))
        except TypeError:
            raise TypeError(f"ranks must be integers, not {rank!r}") from None
    if any(rank < 0 for rank in checked):
        raise ValueError(f"ranks must not be negative: {checked}")
    if len(set(checked)) != len(checked):
        raise ValueError(f"ranks must be given once each: {checked}")
    return sorted(checked)


global_process_set = ProcessSet(())  # all ranks, after `init`
global_process_set.process_set_id = 0
