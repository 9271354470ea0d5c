"""Requests that a program makes in an elastic job: join, pause, restart, leave.

The training thread calls these functions between two steps. Some of the functions wait
until the recovery thread has begun the next epoch. In a static job the functions raise
an error or do nothing.
"""

from __future__ import annotations

import array
import contextlib
from collections.abc import Iterator, Sequence

from ringjax import _native, failpoints
from ringjax.errors import PeerLost, RingjaxError, from_status
from ringjax.membership.client import CoordinatorClient
from ringjax.runtime import lifecycle
from ringjax.runtime.groups import replica_set
from ringjax.world import epoch_devices
from ringjax.world.communicator_ids import private_id
from ringjax.world.epoch_info import EpochInfo
from ringjax.world.world import World

_ALLREDUCE, _MAX = _native.COLLECTIVES["allreduce"], _native.REDUCE_OPS["Max"]
_BARRIER, _SUM = _native.COLLECTIVES["barrier"], _native.REDUCE_OPS["Sum"]


def elastic() -> bool:
    """Returns whether ranks of this job may be lost and join; False before `init`."""
    return lifecycle.is_initialized() and lifecycle.current("elastic").elastic


def epoch_info() -> EpochInfo:
    """Returns the current epoch. Raises RingjaxError if this rank is no member yet."""
    world = lifecycle.current("epoch_info")
    if not world.elastic:
        return EpochInfo.of_static_job(world.rank_info.rank, world.rank_info.size)
    if world.epoch_info is None:
        raise RingjaxError("ringjax.epoch_info: this rank was not admitted yet")
    return world.epoch_info


def is_newcomer() -> bool:
    """Returns whether this process waits to become a member of a running job.

    Rank and size of a newcomer are provisional, and its collectives run alone.
    """
    return elastic() and _world("is_newcomer").epoch_info is None


def has_run_solo() -> bool:
    """Returns whether this newcomer has called collectives outside of `solo_mode`."""
    return elastic() and bool(_world("has_run_solo").solo_mode.first_call)


def solo_mode() -> contextlib.AbstractContextManager[None]:
    """Makes a context in which a newcomer's collectives run alone, for compilation.

    Outside of the context a newcomer's collectives also run on this rank alone, but
    then `has_run_solo` is true. Entering the context raises RingjaxError on a member.
    """
    return _world("solo_mode").solo_mode.active()


def request_admission(*, cold: bool = False) -> None:
    """Requests to become a member of the job, and waits until the job admits this rank.

    Returns immediately on a member. Raises RingjaxError if the job ends without this
    rank. `cold` says that the program compiles its step only as a member.
    """
    if not is_newcomer():
        return
    world = _world("request_admission")
    world.solo_mode.end()
    failpoints.passing("join.ready")
    _client(world).ready(cold=cold)
    world.wait_for_admission()
    failpoints.passing("join.admitted")
    if not epoch_devices.reconnect_devices(world):
        epoch_devices.restart_epoch(world, epoch_devices.LOST)
    lifecycle.run_fresh_start_callbacks()


def confirm() -> None:
    """Waits until all collectives on devices have ended, and raises their errors.

    Collectives on CPUs have ended already when they return. After a RingjaxError, no
    value computed from the failed collective may be used.
    """
    if lifecycle.is_initialized():
        lifecycle.current("confirm").confirm()


def check_updates() -> tuple[int, int]:
    """Returns whether ranks want to join or leave. All ranks call it between steps.

    The result is the sequence number of the pending change of members, or 0 if there is
    none, and the epoch in which the ranks agreed on the change. It is equal on all
    ranks.
    """
    if not elastic():
        return 0, 0
    confirm()
    world = _member("check_updates")
    own, newest = array.array("q", [world.pending_update]), array.array("q", [0])
    try:
        epoch = world.communicators[0].execute(
            _ALLREDUCE, _MAX, [own], [newest], name="ringjax.check_updates"
        )
    except _native.StatusError as error:
        world.check_end()
        raise from_status(error) from error
    return newest[0], epoch


def pause(number: int) -> bool:
    """Pauses the job until its next epoch. All ranks call this between two steps.

    `number` is the first result of `check_updates`. Returns False if this rank has left
    the job. After a RingjaxError, the ranks must call `restart`.
    """
    world = _world("pause")
    failpoints.passing("pause.asked")
    resizes = world.resizes
    while True:
        with world.changed:
            if world.dismissed:
                return False
            # Do not request a pause in an epoch in which all ranks restart: the
            # coordinator would count the request for the next pause in that epoch, and
            # that pause would begin without this rank.
            if world.restart_pending:
                raise PeerLost("ringjax.pause: another rank starts again")
            if world.resizes > resizes:
                break
            before = _member("pause").epoch_number
            sets, next_set, _ = world.epoch_report()
            _client(world).pause(before, number, sets, next_set)
        failpoints.passing("pause.said")
        world.wait_for_next_epoch(before)
    failpoints.passing("pause.over")
    if not epoch_devices.reconnect_devices(world):
        raise PeerLost(f"ringjax.pause: {epoch_devices.LOST}")
    lifecycle.run_fresh_start_callbacks()
    return True


def restart(text: str) -> None:
    """Makes all ranks return to their last commit, and waits for the next epoch.

    A rank calls this after a failure, which `text` describes in the log. Then the
    collectives of the other ranks fail, and these ranks call `restart`, too. Raises
    Fenced or RingjaxError if the job is over for this rank.
    """
    epoch_devices.restart_epoch(_member("restart"), text)
    lifecycle.run_fresh_start_callbacks()


def leave_at_next_pause() -> None:
    """Requests that this rank leaves at the next pause. Signal handlers may call it."""
    world = _world("leave_at_next_pause")
    if world.recovery is not None:
        world.recovery.leave()


def last_contributors() -> tuple[int, ...]:
    """Returns the workers whose values are in the last collective of all ranks."""
    if not elastic():
        return epoch_info().workers
    return _world("last_contributors").last_contributors()


@contextlib.contextmanager
def private_communicator(ranks: Sequence[int]) -> Iterator[_native.Communicator]:
    """Connects some ranks of the world, and disconnects them after a `with` block.

    Exactly these ranks call it. Calls on the communicator are never repeated: if any
    rank of the job is lost, they fail. In a static job, `ranks` must be this rank's
    replica set, and the result is the communicator of that set.
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
    count = world.private_counts[key] = world.private_counts.get(key, 0) + 1
    number, name = private_id(key, count), f"ranks {list(chosen)}"
    try:
        epoch.link(number, chosen, name, world.link_factory_of(epoch))
        with world.changed:
            world.check_epoch(epoch)
            # The heartbeat must not watch this communicator: an exception within the
            # `with` block closes the communicator, which would count as a failure of
            # this rank.
            communicator = epoch.open(number, chosen, name, watched=False)
        yield communicator
        # If a rank closed its links too early, the last call of a peer would fail.
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
    if world.epoch_info is None:
        raise RingjaxError(f"ringjax.{what}: this rank was not admitted yet")
    return world


def _client(world: World) -> CoordinatorClient:
    assert world.client is not None
    return world.client
