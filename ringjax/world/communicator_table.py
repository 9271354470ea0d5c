"""Communicator table: the communicators on which the program's calls run, by id.

In an elastic job a communicator lives for one epoch. A resilient communicator lives for
as long as its id exists: every epoch installs a new communicator into it. The native
core parks the calls of a resilient communicator between two epochs, and repeats them if
necessary. An eager lane lives as long as the resilient communicator that it uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ringjax import _native
from ringjax.world.communicator_ids import EAGER_LANE
from ringjax.world.epoch import Epoch
from ringjax.world.epoch_info import Transition
from ringjax.world.lanes import Lanes


@dataclass
class CommunicatorTable:
    """The communicators on which this rank's program makes calls, by id."""

    _lanes: Lanes
    # The resilient communicators; none in a static job.
    resilient: dict[int, _native.ResilientComm] = field(default_factory=dict)
    # The communicators that serve calls of the program.
    active: dict[int, _native.Communicator] = field(default_factory=dict)

    def retain(self, numbers: Iterable[int]) -> dict[int, _native.ResilientComm]:
        """Keeps the resilient communicators `numbers`. Returns those that must end."""
        kept, before = set(numbers), self.resilient
        self.resilient = {n: r for n, r in before.items() if n in kept}
        return {n: r for n, r in before.items() if n not in kept}

    def install_all(
        self, epoch: Epoch, transitions: Mapping[int, Sequence[Transition]]
    ) -> None:
        """Makes the program's calls run on the communicators of a new epoch.

        Communicators with `transitions` survive; a communicator without transitions
        begins with this epoch. If a surviving communicator is not connected yet, its
        transitions are installed already.
        """
        self.active = {n: c for n, c in self.active.items() if n in transitions}
        for number in {**transitions, **epoch.served}:
            self.install(epoch, number, transitions.get(number, [Transition()]))
        wanted = {number & ~EAGER_LANE for number in {**self.resilient, **self.active}}
        for number in [n for n in self._lanes.lanes if n not in wanted]:
            self._lanes.drop(number)

    def install(
        self, epoch: Epoch, number: int, transitions: Sequence[Transition]
    ) -> None:
        """Makes calls run on communicator `number`, if the epoch has connected it."""
        communicator = epoch.communicators.get(number)
        resilient = self.resilient.get(number)
        is_new = resilient is None
        resilient = resilient or epoch.served.get(number)
        if resilient is not None:
            self.resilient[number] = resilient
            # A resilient communicator that this rank has ended, for example after
            # Ctrl-C, refuses an installation and stays ended.
            with contextlib.suppress(_native.StatusError):
                for transition in transitions[:-1]:
                    _install(resilient, None, transition)
                _install(resilient, communicator, transitions[-1])
        if communicator is None:
            return
        self.active[number] = communicator
        if is_new and number & EAGER_LANE:
            self._lanes.drop(number & ~EAGER_LANE)
            self._lanes.attach(number & ~EAGER_LANE, communicator)

    def end(
        self,
        resilient_comms: Mapping[int, _native.ResilientComm],
        text: str,
        *,
        drop_lanes: bool = False,
    ) -> None:
        """Fails all calls of resilient communicators. May drop their eager lanes."""
        for number, resilient in resilient_comms.items():
            resilient.end(text, -1)
            if drop_lanes and number & EAGER_LANE:
                self._lanes.drop(number & ~EAGER_LANE)

    def clear(self) -> None:
        self.resilient.clear()
        self.active.clear()


def _install(
    resilient: _native.ResilientComm,
    communicator: _native.Communicator | None,
    change: Transition,
) -> None:
    resilient.install(
        communicator, change.finished, change.repeats, change.ranks, change.reason
    )
