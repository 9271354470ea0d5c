"""The eager lanes of a world: each has a communicator to itself, and a thread.

Made when the process set is, on all of its ranks, because a rank may submit a named
operation at any time and all others then take part in the round. What is agreed and
run there is the native core's matter; who submits is in eager/.
"""

from __future__ import annotations

from typing import Any, Protocol

from ringjax import _native
from ringjax.config import Config
from ringjax.errors import StartupError

LANE = 1 << 29  # added to the number of a process set: that of its lane's communicator


class Home(Protocol):
    """What `Lanes` needs of its world."""

    config: Config
    recorder: _native.Recorder

    @property
    def cuda_for_lanes(self) -> dict[str, Any] | None:
        """What a lane needs to take CUDA tensors; None where no rank has a device."""

    @property
    def rank(self) -> int:
        """This rank."""


class Lanes:
    """The eager lanes of one world.

    Attributes:
        lanes: by number of the process set.
    """

    def __init__(self, home: Home) -> None:
        self.lanes: dict[int, _native.EagerLane] = {}
        self._home = home
        self._timeline: _native.Timeline | None = None

    def attach(self, number: int, communicator: _native.Communicator) -> None:
        """Makes the lane of a process set; later communicators come by themselves."""
        config = self._home.config
        self.lanes[number] = _native.EagerLane(
            communicator,
            fusion_threshold=config.fusion_threshold,
            cycle_seconds=config.cycle_time / 1000,
            cache_capacity=config.cache_capacity,
            stall_warning=config.stall_warning,
            timeout=config.collective_timeout,
            cuda=self._home.cuda_for_lanes,
        )
        self.lanes[number].set_timeline(self._timeline)

    def open_timeline(self) -> None:
        """Begins the recording that the settings ask for, on rank 0 of the world.

        Raises:
            StartupError: the file cannot be written.
        """
        config = self._home.config
        if self._home.rank != 0 or config.timeline in ("", "DYNAMIC"):
            return
        try:
            made = _native.Timeline(config.timeline, config.timeline_mark_cycles)
        except _native.StatusError as error:
            raise StartupError(f"RINGJAX_TIMELINE: {error}") from error
        self.record(made)

    def record(self, timeline: _native.Timeline | None) -> None:
        """Reports to it from now on, and to the one before no more."""
        before, self._timeline = self._timeline, timeline
        for lane in self.lanes.values():
            lane.set_timeline(timeline)
        if before is not timeline:
            self._home.recorder.tell(timeline)
        if before is not None:
            before.close()

    def drop(self, number: int) -> None:
        """Ends the lane of a process set, if there is one; what is pending fails.

        Its communicator is ended by somebody else.
        """
        if (lane := self.lanes.pop(number, None)) is not None:
            lane.close()

    def close(self) -> None:
        """Ends all lanes; the world ends their communicators."""
        for lane in self.lanes.values():
            lane.close()
        self.lanes.clear()
        self.record(None)
