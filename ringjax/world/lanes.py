"""The eager lanes of a world: each has its own communicator and its own native thread.

All ranks of a process set make the set's lane when they add the set, because any rank
may submit a named operation at any time, and then all other ranks must take part in the
negotiation. The native core negotiates and runs the operations that eager/ submits.
"""

from __future__ import annotations

from typing import Any, Protocol

from ringjax import _native
from ringjax.config import Config
from ringjax.world import call_records


class LaneOwner(Protocol):
    """The attributes of `World` that are needed to make lanes."""

    config: Config
    recorder: _native.Recorder

    @property
    def cuda_for_lanes(self) -> dict[str, Any] | None:
        """The options for lanes of CUDA tensors, or None if no rank has a device."""

    @property
    def rank(self) -> int: ...


class Lanes:
    """The eager lanes of one world, one for each process set."""

    def __init__(self, owner: LaneOwner) -> None:
        self.lanes: dict[int, _native.EagerLane] = {}  # keys: ids of process sets
        self.owner = owner
        self._timeline: _native.Timeline | None = None

    def attach(self, number: int, communicator: _native.Communicator) -> None:
        """Makes the lane of process set `number`.

        In later epochs of an elastic job, the lane uses the current communicator of the
        resilient communicator to which `communicator` belongs.
        """
        config = self.owner.config
        self.lanes[number] = _native.EagerLane(
            communicator,
            fusion_threshold=config.fusion_threshold,
            cycle_seconds=config.cycle_time / 1000,
            cache_capacity=config.cache_capacity,
            stall_warning=config.stall_warning,
            timeout=config.collective_timeout,
            cuda=self.owner.cuda_for_lanes,
        )
        self.lanes[number].set_timeline(self._timeline)

    def open_timeline(self) -> None:
        """Starts the timeline that RINGJAX_TIMELINE names, on rank 0 of the world.

        If JAX's own collectives have started it already, it continues.
        """
        timeline = call_records.take_timeline()
        if timeline is None and self.owner.rank == 0:
            timeline = call_records.configured_timeline(self.owner.config)
        if timeline is not None:
            self.set_timeline(timeline)
            if self.owner.rank != 0:
                self.set_timeline(None)

    def set_timeline(self, timeline: _native.Timeline | None) -> None:
        """Makes all lanes write events to `timeline`; closes the previous timeline."""
        before, self._timeline = self._timeline, timeline
        for lane in self.lanes.values():
            lane.set_timeline(timeline)
        if before is not timeline:
            self.owner.recorder.tell(timeline)
        if before is not None:
            before.close()

    def drop(self, number: int) -> None:
        """Closes the lane of a process set, if it has one. Pending operations fail.

        The caller closes the communicator of the lane.
        """
        if (lane := self.lanes.pop(number, None)) is not None:
            lane.close()

    def close(self) -> None:
        """Closes all lanes and the timeline, but not the communicators."""
        for lane in self.lanes.values():
            lane.close()
        self.lanes.clear()
        self.set_timeline(None)
