"""The membership of this process, for the other modules of ringjax and for users.

What every job has is in lifecycle.py and handed on here; what only an elastic job has,
whose ranks come and go, is below. In a job that is not elastic these say so, or do
nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ringjax.errors import RingjaxError
from ringjax.runtime import lifecycle
from ringjax.runtime.elastic_requests import Program
from ringjax.runtime.groups import (
    between_groups,
    group_rank,
    group_size,
    refuse_groups,
    replica_set,
)
from ringjax.runtime.lifecycle import (
    ProcessSet,
    add_process_set,
    communicator,
    config,
    cross_rank,
    cross_size,
    current,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    lane,
    local_rank,
    local_size,
    on_fresh_start,
    on_init,
    on_shutdown,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from ringjax.world.generation import Generation
from ringjax.world.world import World

if TYPE_CHECKING:
    from ringjax._native import Communicator

__all__ = [
    "Generation",
    "ProcessSet",
    "add_process_set",
    "admit",
    "between_groups",
    "check_updates",
    "communicator",
    "config",
    "confirm",
    "cross_rank",
    "cross_size",
    "current",
    "elastic",
    "generation",
    "global_process_set",
    "group_rank",
    "group_size",
    "has_called_alone",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_newcomer",
    "lane",
    "last_contributors",
    "leave_at_next_pause",
    "local_rank",
    "local_size",
    "on_fresh_start",
    "on_init",
    "on_shutdown",
    "pause",
    "private_communicator",
    "rank",
    "refuse_groups",
    "rehearsal",
    "remove_process_set",
    "replica_set",
    "restart",
    "shutdown",
    "size",
]


def elastic() -> bool:
    """Whether ranks of this job may be lost and join; False before `init`."""
    return is_initialized() and current("elastic").elastic


def generation() -> Generation:
    """The present membership.

    Raises:
        RingjaxError: this rank has not been admitted yet.
    """
    world = current("generation")
    if not world.elastic:
        return Generation.constant(world.standing.rank, world.standing.size)
    if world.generation is None:
        raise RingjaxError("ringjax.generation: this rank was not admitted yet")
    return world.generation


def is_newcomer() -> bool:
    """Whether this process has come to a job that runs, and is no member of it yet.

    Its rank and size are provisional, and its collectives run alone.
    """
    return elastic() and _world("is_newcomer").generation is None


def has_called_alone() -> bool:
    """Whether this process called collectives as a newcomer, without `rehearsal`."""
    return elastic() and bool(_world("has_called_alone").rehearsal.called)


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Inside it a newcomer's collectives run alone, so that programs can be compiled.

    Without it they do so, too, but `has_called_alone` tells.

    Raises:
        RingjaxError: this rank is a member.
    """
    with _world("rehearsal").rehearsal.within():
        yield


def admit() -> None:
    """A newcomer asks in; returns when it is a member. Members: nothing happens.

    Raises:
        RingjaxError: the job ends without it.
    """
    if is_newcomer():
        _program("admit").admit()
        lifecycle.begin_anew()


def confirm() -> None:
    """Waits until what is enqueued on devices has ended; on CPUs it has.

    Raises:
        PeerLost, RingjaxError: it has failed, and what was computed from it is void.
    """
    if is_initialized():
        current("confirm").confirm()


def check_updates() -> tuple[int, int]:
    """Asks whether ranks want to come or leave; all ranks call it, between two steps.

    Returns:
        The number of the change that waits, 0 if there is none, and the epoch in which
        this was found out: both the same on all ranks.

    Raises:
        PeerLost: a rank was lost, and this could not be repeated.
    """
    if not elastic():
        return 0, 0
    confirm()
    return _program("check_updates").check_updates()


def pause(number: int) -> bool:
    """All ranks call it, between two steps, with what `check_updates` said.

    Returns:
        True in the next epoch; False: this rank does not belong to the job any more.

    Raises:
        RingjaxError: the pause came to no end; `restart` is what remains.
    """
    stays = _program("pause").pause(number)
    if stays:
        lifecycle.begin_anew()
    return stays


def restart(text: str) -> None:
    """After a failure: all ranks go back to their last commit and start again.

    A rank that learns of it from a failure of its own calls this as well; until then
    its collectives fail. Returns in the next epoch.

    Args:
        text: what went wrong here, for the log.

    Raises:
        Fenced, RingjaxError: the job is over for this rank.
    """
    _program("restart").restart(text)
    lifecycle.begin_anew()


def leave_at_next_pause() -> None:
    """Asks to leave in good order. Does nothing else: may be called by a handler."""
    world = _world("leave_at_next_pause")
    if world.recovery is not None:
        world.recovery.leave()


def last_contributors() -> tuple[int, ...]:
    """Whose values are in the last collective of all ranks that has finished.

    Returns:
        Numbers of processes, as in `Generation.workers`.
    """
    if not elastic():
        return generation().workers
    return _world("last_contributors").last_contributors()


@contextlib.contextmanager
def private_communicator(ranks: Sequence[int]) -> Iterator[Communicator]:
    """A communicator between these ranks, for a moment; only they call it.

    Its calls are never repeated: if any rank of the job is lost, they fail. In a job
    whose ranks stay it is that of the replica set, which the ranks have to be.

    Raises:
        PeerLost: a rank is gone.
        ValueError: this rank is not among them.
    """
    if not elastic() and list(ranks) == replica_set().ranks:
        yield communicator(replica_set(), "private_communicator")
        return
    with _program("private_communicator").private_communicator(ranks) as native:
        yield native


def _world(what: str) -> World:
    world = current(what)
    if not world.elastic:
        raise RingjaxError(
            f"ringjax.{what}: the ranks of this job do not change; start it by "
            "ringrun --min-np"
        )
    return world


def _program(what: str) -> Program:
    return Program(_world(what))
