"""Decides in each epoch which rank sends the training state to which ranks.

Ranks may be lost at any time, and the other ranks notice a loss at different times. So
all decisions that must be equal on all ranks, such as the shares of samplers and the
time when training starts again, follow from the results of collectives, which are equal
on all ranks. The runtime, not this module, decides which ranks are members.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ringjax import eager, errors, failpoints, runtime
from ringjax.elastic.transfer import Participants
from ringjax.errors import PeerLost


class HeldState(enum.IntEnum):
    """The training state that a rank holds."""

    CURRENT = 0  # the current state, equal on all ranks that hold it
    COMMITTED = 1  # the rank's last commit, which may differ from other ranks' commits
    NOTHING = 2  # no state, because the rank has just joined


class SyncPlan(NamedTuple):
    """The result of `negotiate`, equal on all ranks.

    Attributes:
        epoch: the epoch of the membership.
        workers: the ids of all workers, in the order of the ranks.
        participants: the sender of the state and its receivers.
        lost: whether no rank holds the state any more.
    """

    epoch: int
    workers: tuple[int, ...]
    participants: Participants
    lost: bool = False

    @property
    def position(self) -> tuple[int, int]:
        """The index of this worker among all workers, and the number of workers."""
        return self.workers.index(own_number()), len(self.workers)


_current: SyncPlan | None = None


def own_number() -> int:
    """Returns this process's worker id."""
    number = runtime.config().worker
    if number is None:
        raise errors.NotInitialized("this process has no RINGJAX_WORKER")
    return number


def current_plan() -> SyncPlan | None:
    """Returns the latest plan of this process, or None outside of elastic training."""
    return _current


def clear_plan() -> None:
    """Deletes the plan when training has ended."""
    global _current
    _current = None


def negotiate(held: HeldState) -> SyncPlan:
    """Makes a plan from the states that all ranks hold. All ranks call `negotiate`."""
    global _current
    _, epoch = runtime.check_updates()
    failpoints.passing("agreement.halfway")
    own = np.array([[own_number(), held]], np.int32)
    rows = np.asarray(eager.allgather(own, name="elastic.agreement"))
    workers = tuple(int(number) for number in rows[:, 0])
    size, place = runtime.group_size(), runtime.group_rank()
    # A group of processes holds a state only if all its processes hold the state.
    groups: dict[int, int] = {}
    for number, rank_holds in rows.tolist():
        group = number // size
        groups[group] = max(rank_holds, groups.get(group, rank_holds))
    ranks = [r for r, number in enumerate(workers) if number % size == place]
    if len(ranks) != len(groups):
        raise PeerLost("a group has come to its end in part, and cannot start again")
    group_states = list(groups.values())
    lost = min(group_states) == HeldState.NOTHING
    _current = SyncPlan(epoch, workers, choose_participants(group_states, ranks), lost)
    return _current


def choose_participants(held: Sequence[int], ranks: Sequence[int]) -> Participants:
    """Chooses the sender and the receivers if ``ranks[i]`` holds ``held[i]``.

    Example:
        >>> current, committed, nothing = HeldState
        >>> choose_participants([current, current, nothing], [0, 1, 2])
        Participants(source=0, receivers=(2,))
        >>> choose_participants([committed, committed, nothing], [1, 3, 5])
        Participants(source=1, receivers=(3, 5))
    """
    source = held.index(min(held))
    # Current states are equal already, but commits may be from different steps.
    is_current = held[source] == HeldState.CURRENT
    receivers = [
        ranks[i]
        for i, state in enumerate(held)
        if i != source and not (is_current and state == HeldState.CURRENT)
    ]
    return Participants(ranks[source], tuple(receivers))


def absent_from_last_call() -> frozenset[int]:
    """Returns the positions of the workers whose data the last call's result lacks.

    These workers were lost during the call, and the other workers repeated the call.
    """
    if _current is None:
        return frozenset()
    present = set(runtime.last_contributors())
    if not present:  # no call has been made yet
        return frozenset()
    return frozenset(i for i, w in enumerate(_current.workers) if w not in present)
