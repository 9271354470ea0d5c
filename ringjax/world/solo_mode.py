"""Solo mode: a newcomer's collectives run on this rank alone until it is a member.

The members are in the middle of their training and admit newcomers only at a pause.
Until then, a newcomer compiles its programs. All its process sets have one rank.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ringjax.errors import RingjaxError
from ringjax.world.communicator_ids import EAGER_LANE, REPLICA_SET
from ringjax.world.devices import Devices
from ringjax.world.epoch import Epoch
from ringjax.world.epoch_devices import SoloControlPlane
from ringjax.world.epoch_sequence import EpochSequence
from ringjax.world.lanes import Lanes
from ringjax.world.rank_info import RankInfo


class SoloMode:
    """Lets a newcomer call collectives on its own, until it becomes a member."""

    def __init__(self, world: EpochSequence) -> None:
        # The first collective that the program called outside of `active`; "" for none.
        self.first_call = ""
        self._world = world
        self._lock = threading.Lock()
        self._until_end = contextlib.ExitStack()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context manager for `runtime.solo_mode`. Raises if this rank is a member."""
        if self._world.epoch_info is not None:
            raise RingjaxError(
                "ringjax.solo_mode: this rank is a member of its job already, so its "
                "collectives need the others"
            )
        with contextlib.nullcontext() if self.first_call else _solo(self._world):
            yield

    def begin(self, what: str) -> None:
        """Starts solo mode until `end`, because the program calls collective `what`."""
        with self._lock:
            if self._world.comm_table.active:
                return
            self._until_end.enter_context(_solo(self._world))
            self.first_call = what
        self._world.log(
            "warning",
            f"{what}, and what follows until elastic.run's function is called, runs on "
            "this rank alone: it has come to a job that runs already",
        )

    def end(self) -> None:
        """Ends solo mode, before this rank becomes a member or leaves the job."""
        with self._lock:
            self._until_end.close()


@contextlib.contextmanager
def _solo(world: EpochSequence) -> Iterator[None]:
    epoch = Epoch(world.config, RankInfo.from_hosts(0, ["here"]))
    lanes, world.lanes = world.lanes, Lanes(world.lanes.owner)
    devices = world.devices
    control_plane = SoloControlPlane(world, epoch)
    world.devices = Devices(world.config, devices.counts, control_plane)
    try:
        if world.group.replicas:
            epoch.connect(REPLICA_SET, [0], "solo mode")
        for number in world.sets:
            epoch.connect(number, [0], "solo mode")
            lane = epoch.connect(number | EAGER_LANE, [0], "solo mode")
            world.lanes.attach(number, lane)
        world.comm_table.active = dict(epoch.communicators)
        if world.local_devices is not None:
            world.devices.open(*world.local_devices, {n: [0] for n in world.sets})
        yield
    finally:
        world.comm_table.active = {}
        world.devices.close()
        world.lanes.close()
        world.lanes, world.devices = lanes, devices
        epoch.close()
