"""What a program asks of an elastic job: pause, start again, come in, leave.

Called from the thread that trains, between steps; the epochs themselves are formed by
the recovery, for which these functions wait.
"""

from __future__ import annotations

import array
import contextlib
import zlib
from collections.abc import Iterator, Sequence

from ringjax import _native, failpoints
from ringjax.errors import PeerLost, RingjaxError, from_status
from ringjax.membership.client import CoordinatorClient
from ringjax.world import elastic_devices
from ringjax.world.world import World

_PRIVATE = 1 << 28  # the numbers of communicators for a moment begin here
_ALLREDUCE, _MAX = _native.COLLECTIVES["allreduce"], _native.REDUCE_OPS["Max"]
_BARRIER, _SUM = _native.COLLECTIVES["barrier"], _native.REDUCE_OPS["Sum"]


class Program:
    """The requests of one program to its world."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def _line(self) -> CoordinatorClient:
        assert self._world.client is not None
        return self._world.client

    def check_updates(self) -> tuple[int, int]:
        """See runtime.check_updates."""
        world = self._world
        self._member("check_updates")
        mine = array.array("q", [world.update])
        most = array.array("q", [0])
        try:
            epoch = world.communicators[0].execute(
                _ALLREDUCE, _MAX, [mine], [most], name="ringjax.check_updates"
            )
        except _native.StatusError as error:
            world.check_end()
            raise from_status(error) from error
        return most[0], epoch

    def pause(self, number: int) -> bool:
        """See runtime.pause."""
        world = self._world
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
                before = self._member("pause")
                sets, next_set, _ = world.reported()
                self._line.pause(before, number, sets, next_set)
            failpoints.passing("pause.said")
            world.wait_for_another(before)
        failpoints.passing("pause.over")
        if not elastic_devices.renew(world):
            raise PeerLost(f"ringjax.pause: {elastic_devices.LOST}")
        return True

    def restart(self, text: str) -> None:
        """See runtime.restart."""
        self._member("restart")
        elastic_devices.start_again(self._world, text)

    def admit(self) -> None:
        """See runtime.admit."""
        world = self._world
        if world.generation is None:
            world.rehearsal.end()
            failpoints.passing("join.ready")
            self._line.ready()
            world.wait_for_admission()
            failpoints.passing("join.admitted")
            if not elastic_devices.renew(world):
                elastic_devices.start_again(world, elastic_devices.LOST)

    def _member(self, what: str) -> int:
        if self._world.generation is None:
            raise RingjaxError(f"ringjax.{what}: this rank was not admitted yet")
        return self._world.generation.epoch

    @contextlib.contextmanager
    def private_communicator(
        self, ranks: Sequence[int]
    ) -> Iterator[_native.Communicator]:
        """See runtime.private_communicator."""
        world, chosen = self._world, tuple(ranks)
        with world.changed:
            self._member("private_communicator")
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
