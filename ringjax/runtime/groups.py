"""The public functions about groups of processes, which world/groups.py explains."""

from __future__ import annotations

from ringjax.errors import StartupError
from ringjax.runtime.lifecycle import (
    ProcessSet,
    config,
    current_or_forked,
    global_process_set,
    on_init,
    replicas,
)


def group_size() -> int:
    """Returns how many processes form a group, which JAX connects; 1 without groups."""
    return current_or_forked("group_size").config.group_size


def group_rank() -> int:
    """Returns the index of this process in its group, from 0 to group_size() - 1.

    JAX calls it ``jax.process_index()``.
    """
    world = current_or_forked("group_rank")
    worker = world.config.worker if world.elastic else world.rank_info.rank
    return (worker or 0) % world.config.group_size


def replica_set() -> ProcessSet:
    """Returns one process of each group: those with this process's index in the group.

    This process is in the set. All processes of the set hold the same shards of the
    model. `allreduce_grads` and `broadcast_parameters` use this set by default. The
    size of the set is the number of groups, and ``replica_set().rank()`` is the index
    of this process's group.

    Returns:
        The replica set; `global_process_set` in a job without groups.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.replica_set().size()
        1
    """
    grouped = current_or_forked("replica_set").config.group_size > 1
    return replicas if grouped else global_process_set


def between_groups(process_set: ProcessSet) -> ProcessSet:
    """Returns `process_set`, or the replica set in place of `global_process_set`."""
    return replica_set() if process_set is global_process_set else process_set


def refuse_groups(what: str) -> None:
    """Makes `init` raise StartupError in jobs of groups, which `what` does not support.

    Raises the error at once if this process is in a job of groups already.
    """

    def check() -> None:
        if (size := config().group_size) > 1:
            raise StartupError(
                f"{what}: RINGJAX_GROUP_SIZE is {size}, but it is JAX that joins the "
                "processes of a group; start this program without --group-size"
            )

    on_init(check)
