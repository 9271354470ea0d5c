"""Groups of processes as programs see them: who am I in mine, who is like me elsewhere.

What groups are is told in `world/groups.py`. The other modules of ringjax take all of
it from __init__.py.
"""

from __future__ import annotations

from ringjax.errors import StartupError
from ringjax.runtime.lifecycle import (
    ProcessSet,
    begun,
    config,
    global_process_set,
    on_init,
    replicas,
)


def group_size() -> int:
    """How many processes JAX joins to one, see `ringrun --group-size`; mostly 1."""
    return begun("group_size").config.group_size


def group_rank() -> int:
    """This process's place in its group, from 0 to group_size() - 1.

    JAX calls it ``jax.process_index()``.
    """
    world = begun("group_rank")
    worker = world.config.worker if world.elastic else world.standing.rank
    return (worker or 0) % world.config.group_size


def replica_set() -> ProcessSet:
    """The processes that have this one's place in their groups, this one among them.

    Each holds the same shards of the model as this one. `allreduce_grads` and
    `broadcast_parameters` use this set by themselves. Its size is the number of groups,
    ``replica_set().rank()`` the number of this process's. In a job without groups,
    these are all ranks: `global_process_set`.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.replica_set().size()
        1
    """
    grouped = begun("replica_set").config.group_size > 1
    return replicas if grouped else global_process_set


def between_groups(process_set: ProcessSet) -> ProcessSet:
    """What shards are exchanged over: `replica_set` for all ranks, else what it is."""
    return replica_set() if process_set is global_process_set else process_set


def refuse_groups(what: str) -> None:
    """Has every `init` of a job of groups raise: `what` cannot be a part of one.

    Raises:
        StartupError: this process is in such a job already.
    """

    def check() -> None:
        if (size := config().group_size) > 1:
            raise StartupError(
                f"{what}: RINGJAX_GROUP_SIZE is {size}, but it is JAX that joins the "
                "processes of a group; start this program without --group-size"
            )

    on_init(check)
