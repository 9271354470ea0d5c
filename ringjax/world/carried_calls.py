"""The communicators that calls of the program get, and what of them outlives an epoch.

In an elastic job that is resilient communicators, and eager lanes. A resilient
communicator belongs to the number of a communicator, and every epoch puts a new
communicator into it. Its calls wait for that in the native core, where they are
repeated, too. Who belongs to an epoch is decided elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple

from ringjax import _native
from ringjax.world.epoch import Epoch
from ringjax.world.generation import Step
from ringjax.world.lanes import LANE, Lanes


class Calls:
    """The calls of one world.

    Args:
        lanes: its eager lanes; each goes on as long as its resilient communicator does.

    Attributes:
        resilient_comms: by number of the communicator.
        serving: the communicators that calls of the program get.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.resilient_comms: dict[int, _native.ResilientComm] = {}
        self.serving: dict[int, _native.Communicator] = {}
        self._lanes = lanes

    def keep(self, numbers: Iterable[int]) -> dict[int, _native.ResilientComm]:
        """Only these go on. Returns the others, which are to be ended."""
        kept = set(numbers)
        ended = {n: s for n, s in self.resilient_comms.items() if n not in kept}
        self.resilient_comms = {
            n: s for n, s in self.resilient_comms.items() if n in kept
        }
        return ended

    def open(self, epoch: Epoch, verdicts: Mapping[int, Sequence[Step]]) -> None:
        """Lets the calls of the program into an epoch.

        Args:
            verdicts: about the calls that went on before, by number. What has none
                begins, and what is not in the epoch yet only hears its verdict.
        """
        self.serving = {n: c for n, c in self.serving.items() if n in verdicts}
        for number in {**verdicts, **epoch.served}:
            self.put(epoch, number, verdicts.get(number, [Step()]))
        wanted = {number & ~LANE for number in {**self.resilient_comms, **self.serving}}
        for number in [n for n in self._lanes.lanes if n not in wanted]:
            self._lanes.drop(number)

    def put(self, epoch: Epoch, number: int, told: Sequence[Step]) -> None:
        """Puts a communicator of an epoch in force, if it is there yet.

        Args:
            told: what becomes of the calls before it, membership by membership.
        """
        communicator = epoch.communicators.get(number)
        resilient = self.resilient_comms.get(number)
        fresh = resilient is None
        resilient = resilient or epoch.served.get(number)
        if resilient is not None:
            self.resilient_comms[number] = resilient
            # One that has ended on this rank, by Ctrl-C for example, stays so.
            with contextlib.suppress(_native.StatusError):
                for step in told[:-1]:
                    resilient.install(None, *astuple(step))
                resilient.install(communicator, *astuple(told[-1]))
        if communicator is None:
            return
        self.serving[number] = communicator
        if fresh and number & LANE:
            self._lanes.drop(number & ~LANE)
            self._lanes.attach(number & ~LANE, communicator)

    def end(
        self,
        resilient_comms: Mapping[int, _native.ResilientComm],
        text: str,
        *,
        lanes_too: bool = False,
    ) -> None:
        """Fails what waits in these, and what comes."""
        for number, resilient in resilient_comms.items():
            resilient.end(text, -1)
            if lanes_too and number & LANE:
                self._lanes.drop(number & ~LANE)

    def clear(self) -> None:
        """Forgets all."""
        self.resilient_comms.clear()
        self.serving.clear()
