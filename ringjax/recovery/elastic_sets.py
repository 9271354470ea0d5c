"""Links within an epoch of an elastic job: a process set, or a few ranks for a moment.

Made by the program's thread while the recovery may end the epoch at any time: then a
process set is tried again with the ranks that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ringjax.errors import Mismatch, PeerLost, RingjaxError
from ringjax.links.mesh import Fabric
from ringjax.recovery.generation import Generation
from ringjax.world.devices import Devices
from ringjax.world.epoch import Epoch
from ringjax.world.lanes import LANE

_NEWS = 1.0  # seconds until the coordinator has said why an agreement broke off


class Home(Protocol):
    """What is needed of the world."""

    generation: Generation | None
    waits: bool
    sets: dict[int, list[int]]
    devices: Devices

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def present(self) -> Epoch | None:
        """The epoch in force."""

    def agree(self, what: str, ranks: Sequence[int]) -> None:
        """All ranks say the same; raises if one does not, or is lost."""

    def adopt(self, epoch: Epoch, number: int, ranks: Sequence[int]) -> None:
        """Takes a process set that was connected."""

    def is_over(self, epoch: Epoch, seconds: float = 0.0) -> bool:
        """Whether an epoch has ended, or will be within so much time."""

    def check_epoch(self, epoch: Epoch) -> None:
        """Raises if it is over."""

    def wait_for_another(self, before: int) -> None:
        """Waits for the next one."""


def add(world: Home, number: int, ranks: Sequence[int], what: str) -> None:
    """Registers a process set; collective over the world.

    If ranks are lost meanwhile, it begins again with those that are left, unless some
    rank has come to its end: then all have the set already.
    """
    while number not in world.sets:
        generation, epoch = world.generation, world.present
        if generation is None or epoch is None:
            world.sets[number] = list(ranks)  # a newcomer: the job will tell its ranks
            return
        try:
            _add(world, epoch, number, ranks, what)
            return
        except Mismatch:
            raise
        except RingjaxError:
            if not world.is_over(epoch, _NEWS):
                raise
        world.wait_for_another(epoch.number)
        if world.waits or world.generation is None:
            raise PeerLost(f"ringjax.{what}: another rank starts again")
        kept = {generation.workers[rank] for rank in ranks}
        ranks = [r for r, w in enumerate(world.generation.workers) if w in kept]


def _add(
    world: Home, epoch: Epoch, number: int, ranks: Sequence[int], what: str
) -> None:
    world.agree(f"{what} {number}", ranks)
    both = (number, number | LANE) if world.rank in ranks else ()
    try:
        for each in both:
            name = f"process set {number}"
            epoch.link(each, ranks, name, within(world, epoch))
        world.adopt(epoch, number, ranks)
    except BaseException:
        for each in both:
            epoch.disconnect(each)
        raise
    world.devices.add(number, ranks)


class _Watch:
    """Ends what is being linked when its epoch ends."""

    def __init__(self, world: Home, epoch: Epoch) -> None:
        self._world, self._epoch = world, epoch

    def gone(self) -> dict[int, str]:
        self._world.check_epoch(self._epoch)
        return {}


def within(world: Home, epoch: Epoch) -> Fabric | None:
    """Connects ranks of an epoch that is in force, as long as it is."""
    fabric = epoch.fabric
    return None if fabric is None else replace(fabric, session=_Watch(world, epoch))
