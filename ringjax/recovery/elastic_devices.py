"""Device communicators of an elastic job: made anew in every epoch in which all begin.

The program's thread makes them while the recovery may end the epoch at any time. So
whatever belongs to one set of them is tied to one epoch: what comes too late fails,
and is not taken for a part of the next one. Which epoch that is, is up to
elastic_world.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from ringjax import _native, failpoints
from ringjax.config import Config
from ringjax.errors import RingjaxError, Stalled
from ringjax.membership.client import CoordinatorClient
from ringjax.recovery.elastic_sets import within
from ringjax.world.devices import Devices
from ringjax.world.epoch import Epoch

LOST = "a rank was lost while the ranks connected their devices"
_NEWS = 1.0  # seconds until the coordinator has said who is lost


class Home(Protocol):
    """What is needed of the world."""

    config: Config
    changed: threading.Condition
    devices: Devices
    device: tuple[Sequence[int], str] | None
    sets: dict[int, list[int]]
    waits: bool

    @property
    def epoch(self) -> Epoch:
        """The present one."""

    @property
    def client(self) -> CoordinatorClient | None:
        """Speaks with the coordinator."""

    def check_end(self) -> None:
        """Raises why this rank cannot go on, if that is so."""

    def check_epoch(self, epoch: Epoch) -> None:
        """Raises if it is over."""

    def wait_for_another(self, before: int) -> None:
        """Waits for another epoch than that one, or for what comes instead."""

    def acknowledge(self) -> None:
        """The program starts again: its calls belong to the present epoch."""

    def is_over(self, epoch: Epoch, seconds: float = 0.0) -> bool:
        """Whether an epoch has ended, or will be within so much time."""

    def log(self, level: str, text: str) -> None:
        """Prints a line, if the level is wanted."""


class Seat:
    """This rank's place in one epoch, as its device communicators need it."""

    def __init__(self, world: Any, epoch: Epoch) -> None:
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
        line: CoordinatorClient = self._world.client
        seconds = self.config.start_timeout
        number = self._epoch.number
        try:
            return line.exchange(value, seconds, what, number)
        except Stalled as error:
            # A program that hangs would end the job: the others go on without its rank.
            for rank in error.ranks:
                line.suspect(number, rank, f"did not take part within {seconds:g} s")
            raise

    def connect_control(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        """Builds a watched communicator of small links between `ranks`."""
        world, epoch = self._world, self._epoch
        try:
            small = epoch.link_small(number, ranks, name, within(world, epoch))
            with world.changed:  # or it would not be stopped with the epoch
                world.check_epoch(epoch)
                return epoch.open(number, ranks, name, config=small)
        except BaseException:
            epoch.disconnect(number)
            raise

    def disconnect(self, number: int) -> None:
        """Ends it."""
        self._epoch.disconnect(number)

    def gone(self) -> dict[int, str]:
        """The ranks that are known to have gone, and why."""
        line: CoordinatorClient = self._world.client
        return line.gone()


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


def renew(world: Home) -> bool:
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


def start_again(world: Home, text: str) -> None:
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


def _patience(world: Home, epoch: Epoch, error: RingjaxError) -> float:
    """Seconds in which an epoch may turn out to be over that NCCL has failed in.

    A rank whose device fails, or does not fit the others', ends with that error, and is
    lost to the others. They must not end before they know.
    """
    blamed = error.rank if error.rank >= 0 else getattr(error.__cause__, "rank", -1)
    others = blamed not in (-1, epoch.standing.rank)
    return max(_NEWS, world.config.failure_timeout) if others else _NEWS
