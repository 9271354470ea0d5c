"""A newcomer's collectives run alone, until it is a member of its job.

The others are in the middle of their training, and take nobody in before they pause.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ringjax.errors import RingjaxError
from ringjax.world.coordinates import Standing
from ringjax.world.devices import Devices
from ringjax.world.elastic_devices import Alone
from ringjax.world.epoch import Epoch
from ringjax.world.groups import REPLICAS
from ringjax.world.lanes import LANE, Lanes


class Rehearsal:
    """The time in which collectives of one newcomer find nobody else.

    Args:
        world: the newcomer's, a `World`.

    Attributes:
        called: what the program has called outside of `within`, first; "": nothing.
    """

    def __init__(self, world: Any) -> None:
        self.called = ""
        self._world = world
        self._lock = threading.Lock()
        self._until_end = contextlib.ExitStack()

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """See runtime.rehearsal."""
        if self._world.generation is not None:
            raise RingjaxError(
                "ringjax.rehearsal: this rank is a member of its job already, so its "
                "collectives need the others"
            )
        with contextlib.nullcontext() if self.called else _alone(self._world):
            yield

    def begin(self, what: str) -> None:
        """Until `end`, because the program has called a collective."""
        with self._lock:
            if self._world.calls.serving:
                return
            self._until_end.enter_context(_alone(self._world))
            self.called = what
        self._world.log(
            "warning",
            f"{what}, and what follows until elastic.run's function is called, runs on "
            "this rank alone: it has come to a job that runs already",
        )

    def end(self) -> None:
        """The rank is about to become a member, or to leave."""
        with self._lock:
            self._until_end.close()


@contextlib.contextmanager
def _alone(world: Any) -> Iterator[None]:
    alone = Epoch(world.config, Standing.of(0, ["here"]))
    before, world.lanes = world.lanes, Lanes(world)
    devices = world.devices
    world.devices = Devices(Alone(world, alone), devices.counts)
    try:
        if world.group.replicas:
            alone.connect(REPLICAS, [0], "rehearsal")
        for number in world.sets:
            alone.connect(number, [0], "rehearsal")
            world.lanes.attach(number, alone.connect(number | LANE, [0], "rehearsal"))
        world.calls.serving = dict(alone.communicators)
        if world.device is not None:
            world.devices.open(*world.device, {n: [0] for n in world.sets})
        yield
    finally:
        world.calls.serving = {}
        world.devices.close()
        world.lanes.close()
        world.lanes, world.devices = before, devices
        alone.close()
