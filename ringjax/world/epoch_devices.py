"""Connects the devices of an elastic job again whenever all ranks restart.

The program's thread connects the devices, while the recovery thread may end the epoch
at any time. So each `Devices` has an `EpochControlPlane`, which belongs to one epoch:
after the end of that epoch its operations fail, instead of becoming part of the next
epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ringjax import _native, failpoints
from ringjax.errors import RingjaxError, Stalled
from ringjax.world.devices import Devices
from ringjax.world.epoch import Epoch
from ringjax.world.epoch_sequence import EpochSequence

LOST = "a rank was lost while the ranks connected their devices"
REVOKE_DELAY = 1.0  # seconds for the coordinator to report a lost rank
_Value = TypeVar("_Value")


class EpochControlPlane:
    """The host communication of one epoch that connects device communicators."""

    def __init__(self, world: EpochSequence, epoch: Epoch) -> None:
        self.log = world.log
        self.rank_info = epoch.rank_info
        self._world, self._epoch = world, epoch

    def exchange(self, value: _Value, what: str) -> list[_Value]:
        client, seconds = self._world.client, self._world.config.start_timeout
        number = self._epoch.number
        if client is None:
            return [value]
        try:
            return client.exchange(value, seconds, what, number)
        except Stalled as error:
            # If the program of one rank hangs, the job must continue: report that rank
            # as suspect, so that the other ranks continue without it.
            for rank in error.ranks:
                client.suspect(number, rank, f"did not take part within {seconds:g} s")
            raise

    def connect_control(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        world, epoch = self._world, self._epoch
        try:
            small = epoch.link_small(number, ranks, name, world.link_factory_of(epoch))
            # The lock keeps the recovery from stopping the epoch between `check_epoch`
            # and `open`, because the recovery would miss the new communicator.
            with world.changed:
                world.check_epoch(epoch)
                return epoch.open(number, ranks, name, config=small)
        except BaseException:
            epoch.disconnect(number)
            raise

    def disconnect(self, number: int) -> None:
        self._epoch.disconnect(number)

    def departed_ranks(self) -> dict[int, str]:
        return self._world.departed_ranks()


class SoloControlPlane(EpochControlPlane):
    """The control plane of a newcomer in solo mode, whose epoch has one rank."""

    def exchange(self, value: _Value, what: str) -> list[_Value]:
        return [value]

    def connect_control(
        self, number: int, ranks: Sequence[int], name: str
    ) -> _native.Communicator:
        return self._epoch.connect(number, ranks, name)


def reconnect_devices(world: EpochSequence) -> bool:
    """Connects the devices of all ranks in the current epoch. All ranks call this.

    Returns False if nothing was connected, because the epoch is over or a restart is
    pending. If `Devices.open` raises a StartupError, the epoch continues.
    """
    world.devices.close()
    if world.local_devices is None:
        return True
    with world.changed:
        if world.restart_pending:
            return False
        # Omit process sets all of whose ranks are lost.
        sets = {n: list(ranks) for n, ranks in world.sets.items() if ranks}
        epoch = world.epoch
        control_plane = EpochControlPlane(world, epoch)
        devices = Devices(world.config, world.devices.counts, control_plane)
        world.devices = devices
    try:
        devices.open(*world.local_devices, sets)
    except RingjaxError as error:
        if not world.is_over(epoch, _seconds_until_over(world, epoch, error)):
            raise
        world.log("debug", f"epoch {epoch.number} has ended: {error}")
        return False
    return True


def restart_epoch(world: EpochSequence, text: str) -> None:
    """Waits for an epoch in which all ranks restart, and connects devices there.

    `text` is the cause of this rank's request, for the log. Raises RingjaxError if the
    job is over for this rank, or StartupError if its devices cannot be connected.
    """
    assert world.client is not None
    while True:
        with world.changed:
            before, pending = world.epoch.number, world.restart_pending
            if not pending:
                world.check_end()
                world.client.restart(before, text)
        if not pending:
            failpoints.passing("restart.said")
            world.wait_for_next_epoch(before)
            continue
        world.accept_restart()
        if reconnect_devices(world):
            return


def _seconds_until_over(
    world: EpochSequence, epoch: Epoch, error: RingjaxError
) -> float:
    """Returns how long to wait for the end of an epoch in which NCCL has failed.

    A rank whose device fails, or is not compatible, ends with that error, and the other
    ranks must detect the loss before they fail themselves. If another rank caused the
    error, the detection takes up to the failure timeout.
    """
    cause = error.rank if error.rank >= 0 else getattr(error.__cause__, "rank", -1)
    is_other = cause not in (-1, epoch.rank_info.rank)
    return max(REVOKE_DELAY, world.config.failure_timeout) if is_other else REVOKE_DELAY
