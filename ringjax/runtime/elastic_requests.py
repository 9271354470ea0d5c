"""What a program asks of an elastic job: pause, start again, come in, leave.

Called from the thread that trains, between steps; the epochs themselves are formed by
the recovery, for which these functions wait. In a job that is not elastic they say so,
or do nothing.
"""

from __future__ import annotations

import array
import contextlib
import zlib
from collections.abc import Iterator, Sequence

from ringjax import _native, failpoints
from ringjax.errors import PeerLost, RingjaxError, from_status
from ringjax.membership.client import CoordinatorClient
from ringjax.runtime import lifecycle
from ringjax.runtime.groups import replica_set
from ringjax.world import elastic_devices
from ringjax.world.generation import Generation
from ringjax.world.world import World

_PRIVATE = 1 << 28  # the numbers of communicators for a moment begin here
_ALLREDUCE, _MAX = _native.COLLECTIVES["allreduce"], _native.REDUCE_OPS["Max"]
_BARRIER, _SUM = _native.COLLECTIVES["barrier"], _native.REDUCE_OPS["Sum"]


def elastic() -> bool:
    """Whether ranks of this job may be lost and join; False before `init`."""
    return lifecycle.is_initialized() and lifecycle.current("elastic").elastic


def generation() -> Generation:
    """The present membership.

    Raises:
        RingjaxError: this rank has not been admitted yet.
    """
    world = lifecycle.current("generation")
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
    if not is_newcomer():
        return
    world = _world("admit")
    world.rehearsal.end()
    failpoints.passing("join.ready")
    _client(world).ready()
    world.wait_for_admission()
    failpoints.passing("join.admitted")
    if not elastic_devices.renew(world):
        elastic_devices.start_again(world, elastic_devices.LOST)
    lifecycle.begin_anew()


def confirm() -> None:
    """Waits until what is enqueued on devices has ended; on CPUs it has.

    Raises:
        PeerLost, RingjaxError: it has failed, and what was computed from it is void.
    """
    if lifecycle.is_initialized():
        lifecycle.current("confirm").confirm()


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
    world = _member("check_updates")
    mine, most = array.array("q", [world.update]), array.array("q", [0])
    try:
        epoch = world.communicators[0].execute(
            _ALLREDUCE, _MAX, [mine], [most], name="ringjax.check_updates"
        )
    except _native.StatusError as error:
        world.check_end()
        raise from_status(error) from error
    return most[0], epoch


def pause(number: int) -> bool:
    """All ranks call it, between two steps, with what `check_updates` said.

    Returns:
        True in the next epoch; False: this rank does not belong to the job any more.

    Raises:
        RingjaxError: the pause came to no end; `restart` is what remains.
    """
    world = _world("pause")
    failpoints.passing("pause.asked")
    resizes = world.resizes
    while True:
        with world.changed:
            if world.dismissed:
                return False
            # Said in an epoch in which all start again, it would count for the next
            # pause there, which then would begin without this rank.
            if world.waits:
                raise PeerLost("ringjax.pause: another rank starts again")
            if world.resizes > resizes:
                break
            before = _member("pause").number
            sets, next_set, _ = world.reported()
            _client(world).pause(before, number, sets, next_set)
        failpoints.passing("pause.said")
        world.wait_for_another(before)
    failpoints.passing("pause.over")
    if not elastic_devices.renew(world):
        raise PeerLost(f"ringjax.pause: {elastic_devices.LOST}")
    lifecycle.begin_anew()
    return True


def restart(text: str) -> None:
    """After a failure: all ranks go back to their last commit and start again.

    A rank that learns of it from a failure of its own calls this as well; until then
    its collectives fail. Returns in the next epoch.

    Args:
        text: what went wrong here, for the log.

    Raises:
        Fenced, RingjaxError: the job is over for this rank.
    """
    elastic_devices.start_again(_member("restart"), text)
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
def private_communicator(ranks: Sequence[int]) -> Iterator[_native.Communicator]:
    """A communicator between these ranks, for a moment; only they call it.

    Its calls are never repeated: if any rank of the job is lost, they fail. In a job
    whose ranks stay it is that of the replica set, which the ranks have to be.

    Raises:
        PeerLost: a rank is gone.
        ValueError: this rank is not among them.
    """
    if not elastic() and list(ranks) == replica_set().ranks:
        yield lifecycle.communicator(replica_set(), "private_communicator")
        return
    world, chosen = _member("private_communicator"), tuple(ranks)
    epoch = world.epoch
    if world.rank not in chosen:
        raise ValueError(
            f"ringjax.private_communicator: ranks are {list(chosen)}, without this "
            f"one, {world.rank}"
        )
    key = (epoch.number, *chosen)
    count = world.privates[key] = world.privates.get(key, 0) + 1
    digest = zlib.crc32(str((key, count)).encode()) & (_PRIVATE - 1)
    number, name = _PRIVATE | digest, f"ranks {list(chosen)}"
    try:
        epoch.link(number, chosen, name, world.within(epoch))
        with world.changed:
            world.check_epoch(epoch)
            # Not watched: who has an exception here is no lost rank.
            communicator = epoch.open(number, chosen, name, watched=False)
        yield communicator
        # Who is done first must not hang up on the others.
        communicator.execute(_BARRIER, _SUM, [], [], name="ringjax: the end")
    except _native.StatusError as error:
        world.check_end()
        raise from_status(error) from error
    finally:
        epoch.disconnect(number)


def _world(what: str) -> World:
    world = lifecycle.current(what)
    if not world.elastic:
        raise RingjaxError(
            f"ringjax.{what}: the ranks of this job do not change; start it by "
            "ringrun --min-np"
        )
    return world


def _member(what: str) -> World:
    world = _world(what)
    if world.generation is None:
        raise RingjaxError(f"ringjax.{what}: this rank was not admitted yet")
    return world


def _client(world: World) -> CoordinatorClient:
    assert world.client is not None
    return world.client
