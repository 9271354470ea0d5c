"""Device communicators: made anew in every epoch in which all ranks begin.

The program's thread makes them while the recovery may end the epoch at any time. So
whatever belongs to one set of them is tied to one epoch: what comes too late fails,
and is not taken for a part of the next one. Which epoch that is, is up to
epoch_sequence.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringjax import _native, failpoints
from ringjax.config import Config
from ringjax.errors import RingjaxError, Stalled
from ringjax.world.devices import Devices
from ringjax.world.epoch import Epoch
from ringjax.world.epoch_sequence import EpochSequence

LOST = "a rank was lost while the ranks connected their devices"
_NEWS = 1.0  # seconds until the coordinator has said who is lost


class Seat:
    """This rank's place in one epoch, as its device communicators need it."""

    def __init__(self, world: EpochSequence, epoch: Epoch) -> None:
        self.config: Config = world.config
        self.log = world.log
        self.standing = epoch.standing
        self._world, self._epoch = world, epoch

    @property
    def rank(self) -> int:
        """This rank."""
        return self._epoch.standing.rank

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Gives every rank of the epoch the values of all ranks."""
        client, seconds = self._world.client, self.config.start_timeout
        number = self._epoch.number
        if client is None:
            return [value]
        try:
            return client.exchange(value, seconds, what, number)
        except Stalled as error:
            # A program that hangs would end the job: the others go on without its rank.
            for rank in error.ranks:
                client.suspect(number, rank, f"did not take part within {seconds:g} s")
            raise

    def connect_control(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        """Builds a watched communicator of small links between `ranks`."""
        world, epoch = self._world, self._epoch
        try:
            small = epoch.link_small(number, ranks, name, world.within(epoch))
            with world.changed:  # or it would not be stopped with the epoch
                world.check_epoch(epoch)
                return epoch.open(number, ranks, name, config=small)
        except BaseException:
            epoch.disconnect(number)
            raise

    def disconnect(self, number: int) -> None:
        """Ends it."""
        self._epoch.disconnect(number)

    def departed_ranks(self) -> dict[int, str]:
        """The ranks that are known to have gone, and why."""
        return self._world.departed_ranks()


class Alone(Seat):
    """The same for an epoch of one rank, in which a newcomer rehearses."""

    def exchange(self, value: Any, what: str) -> list[Any]:
        """There is nobody else."""
        return [value]

    def connect_control(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        """Builds a communicator without links."""
        return self._epoch.connect_small(number, ranks, name)


def renew(world: EpochSequence) -> bool:
    """Connects the devices of all ranks in the present epoch; all of them call it.

    Returns:
        False: that epoch is over, or all start again in it. Nothing is connected.

    Raises:
        StartupError: as `Devices.open`, and the epoch goes on.
    """
    world.devices.close()
    if world.device is None:
        return True
    with world.changed:
        if world.waits:
            return False
        # A process set may have lost all its ranks.
        sets = {n: list(ranks) for n, ranks in world.sets.items() if ranks}
        epoch = world.epoch
        devices = Devices(Seat(world, epoch), world.devices.counts)
        world.devices = devices
    try:
        devices.open(*world.device, sets)
    except RingjaxError as error:
        if not world.is_over(epoch, _patience(world, epoch, error)):
            raise
        world.log("debug", f"epoch {epoch.number} has ended: {error}")
        return False
    return True


def start_again(world: EpochSequence, text: str) -> None:
    """Goes on in an epoch in which all ranks begin anew; all of them come to it.

    Args:
        text: why, for the log.

    Raises:
        Fenced, RingjaxError: the job is over for this rank.
        StartupError: its device cannot be connected.
    """
    assert world.client is not None
    while True:
        with world.changed:
            before, waits = world.epoch.number, world.waits
            if not waits:
                world.check_end()
                world.client.restart(before, text)
        if not waits:
            failpoints.passing("restart.said")
            world.wait_for_another(before)
            continue
        world.acknowledge()
        if renew(world):
            return


def _patience(world: EpochSequence, epoch: Epoch, error: RingjaxError) -> float:
    """Seconds in which an epoch may turn out to be over that NCCL has failed in.

    A rank whose device fails, or does not fit the others', ends with that error, and is
    lost to the others. They must not end before they know.
    """
    blamed = error.rank if error.rank >= 0 else getattr(error.__cause__, "rank", -1)
    others = blamed not in (-1, epoch.standing.rank)
    return max(_NEWS, world.config.failure_timeout) if others else _NEWS
