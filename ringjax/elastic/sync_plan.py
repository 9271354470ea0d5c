"""What all ranks of an elastic job know alike: who takes part, since which epoch.

A rank may be lost at any moment, and ranks do not learn of it at the same time. So what
must not differ between ranks (who has which samples, when training starts again) hangs
on results of collectives, which are the same everywhere. Not the membership itself,
which is the runtime's.
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
    """What a rank has of the training state."""

    CURRENT = 0  # what everybody else has who says this
    COMMITTED = 1  # its own; all take that of one rank
    NOTHING = 2  # it has just come


class SyncPlan(NamedTuple):
    """A result of `agree`.

    Attributes:
        epoch: of the membership.
        workers: the numbers of all workers, in the order of the ranks.
        participants: who sends the state to whom.
        lost: nobody has the state any more: all who had it are gone.
    """

    epoch: int
    workers: tuple[int, ...]
    participants: Participants
    lost: bool = False

    @property
    def share(self) -> tuple[int, int]:
        """This worker's place among them, and how many there are."""
        return self.workers.index(own_number()), len(self.workers)


_current: SyncPlan | None = None


def own_number() -> int:
    """This process's worker number."""
    number = runtime.config().worker
    if number is None:
        raise errors.NotInitialized("this process has no RINGJAX_WORKER")
    return number


def current_plan() -> SyncPlan | None:
    """The last one of this process; None outside of elastic training."""
    return _current


def clear_plan() -> None:
    """Training is over."""
    global _current
    _current = None


def negotiate(held: HeldState) -> SyncPlan:
    """All ranks say what they have; all of them get the same answer.

    Raises:
        RingjaxError: it could not be finished.
    """
    global _current
    _, epoch = runtime.check_updates()
    failpoints.passing("agreement.halfway")
    mine = np.array([[own_number(), held]], np.int32)
    rows = np.asarray(eager.allgather(mine, name="elastic.agreement"))
    workers = tuple(int(number) for number in rows[:, 0])
    size, place = runtime.group_size(), runtime.group_rank()
    groups: dict[int, int] = {}  # a group has what each of its ranks has, at least
    for number, one in rows.tolist():
        groups[number // size] = max(one, groups.get(number // size, one))
    ranks = [r for r, number in enumerate(workers) if number % size == place]
    if len(ranks) != len(groups):
        raise PeerLost("a group has come to its end in part, and cannot start again")
    everyone = list(groups.values())
    lost = min(everyone) == HeldState.NOTHING
    _current = SyncPlan(epoch, workers, choose_participants(everyone, ranks), lost)
    return _current


def choose_participants(held: Sequence[int], ranks: Sequence[int]) -> Participants:
    """Who sends the state to whom, if ``ranks[i]`` has ``held[i]``.

    Example:
        >>> current, committed, nothing = HeldState
        >>> choose_participants([current, current, nothing], [0, 1, 2])
        Participants(source=0, receivers=(2,))
        >>> choose_participants([committed, committed, nothing], [1, 3, 5])
        Participants(source=1, receivers=(3, 5))
    """
    source = held.index(min(held))
    current = held[source] == HeldState.CURRENT
    needs = [i for i, one in enumerate(held) if not current or one != HeldState.CURRENT]
    return Participants(ranks[source], tuple(ranks[i] for i in needs if i != source))


def absent_from_last_call() -> frozenset[int]:
    """Shares (places among the workers) that are not in the last result of all ranks.

    Their ranks were lost before it was finished; the others have repeated it.
    """
    if _current is None:
        return frozenset()
    present = set(runtime.last_contributors())
    if not present:  # there was no call yet
        return frozenset()
    return frozenset(i for i, w in enumerate(_current.workers) if w not in present)
