"""The place of this rank among the ranks that share the pieces of a step.

In an elastic job, rank and size change at a repair, at different times on different
ranks. So the place comes from the plan to which all ranks agreed at the last commit.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringjax import errors, runtime
from ringjax.elastic import sync_plan


@dataclass(frozen=True)
class Place:
    """The place of this rank.

    Attributes:
        index: from 0 to count - 1.
        count: the number of places; ranks that were lost since then keep theirs.
        plan: the same object as long as index and count keep their meaning. It is
            replaced on all ranks before the same step.
    """

    index: int
    count: int
    plan: object


def current_place(what: str) -> Place:
    """Returns this rank's place. `what` names the calling function in errors.

    Raises:
        NotInitialized: before `ringjax.init`.
        RingjaxError: in an elastic job, outside of `ringjax.elastic.run`.
    """
    rank, size = runtime.rank(), runtime.size()
    if not runtime.elastic():
        return Place(rank, size, runtime.current(what))
    if runtime.is_newcomer():  # warm_up: this rank computes all pieces, alone
        return Place(0, 1, runtime.current(what))
    plan = sync_plan.current_plan()
    if plan is None:
        raise errors.RingjaxError(
            f"{what}: in an elastic job, rank {rank} has no agreed place outside of "
            "the training function; call the step inside of a function that is "
            "decorated by ringjax.elastic.run"
        )
    return Place(*plan.position, plan)
