"""What of an elastic job's calls goes on from epoch to epoch: successions, and lanes.

A succession belongs to the number of a communicator, and every epoch puts a new
communicator into it. Its calls wait for that in the native core, where they are
repeated, too. Who belongs to an epoch is decided elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple

from ringjax import _native
from ringjax.recovery.generation import Step
from ringjax.world.epoch import Epoch
from ringjax.world.lanes import LANE, Lanes


class Calls:
    """The calls of one world.

    Args:
        lanes: its eager lanes; each goes on as long as its succession does.

    Attributes:
        successions: by number of the communicator.
        serving: the communicators that calls of the program get.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.successions: dict[int, _native.Succession] = {}
        self.serving: dict[int, _native.Communicator] = {}
        self._lanes = lanes

    def keep(self, numbers: Iterable[int]) -> dict[int, _native.Succession]:
        """Only these go on. Returns the others, which are to be ended."""
        kept = set(numbers)
        ended = {n: s for n, s in self.successions.items() if n not in kept}
        self.successions = {n: s for n, s in self.successions.items() if n in kept}
        return ended

    def open(self, epoch: Epoch, verdicts: Mapping[int, Sequence[Step]]) -> None:
        """Lets the calls of the program into an epoch.

        Args:
            verdicts: about the calls that went on before, by number. What has none
                begins, and what is not in the epoch yet only hears its verdict.
        """
        self.serving = {n: c for n, c in self.serving.items() if n in verdicts}
        for number in {**verdicts, **epoch.successions}:
            self.put(epoch, number, verdicts.get(number, [Step()]))
        wanted = {number & ~LANE for number in self.successions}
        for number in [n for n in self._lanes.lanes if n not in wanted]:
            self._lanes.drop(number)

    def put(self, epoch: Epoch, number: int, told: Sequence[Step]) -> None:
        """Puts a communicator of an epoch in force, if it is there yet.

        Args:
            told: what becomes of the calls before it, membership by membership.
        """
        communicator = epoch.communicators.get(number)
        succession = self.successions.get(number)
        fresh = succession is None
        if succession is None:
            succession = self.successions[number] = epoch.successions[number]
        # One that has ended on this rank, by Ctrl-C for example, stays so.
        with contextlib.suppress(_native.StatusError):
            for step in told[:-1]:
                succession.install(None, *astuple(step))
            succession.install(communicator, *astuple(told[-1]))
        if communicator is None:
            return
        self.serving[number] = communicator
        if fresh and number & LANE:
            self._lanes.drop(number & ~LANE)
            self._lanes.attach(number & ~LANE, communicator)

    def end(
        self,
        successions: Mapping[int, _native.Succession],
        text: str,
        *,
        lanes_too: bool = False,
    ) -> None:
        """Fails what waits in these, and what comes."""
        for number, succession in successions.items():
            succession.end(text, -1)
            if lanes_too and number & LANE:
                self._lanes.drop(number & ~LANE)

    def clear(self) -> None:
        """Forgets all."""
        self.successions.clear()
        self.serving.clear()
