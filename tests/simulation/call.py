"""Simulated collectives: inputs, arrival times of inputs, and results."""

from __future__ import annotations

from typing import Any

CallKey = tuple[Any, ...]


class Violation(AssertionError):
    """Raised if an invariant does not hold."""


class SimulatedComm:
    """The communicator of one epoch, which all its members share."""

    __slots__ = ("calls", "epoch", "order", "ready", "size")

    def __init__(self, epoch: int, order: tuple[int, ...]) -> None:
        self.epoch, self.order, self.size = epoch, order, len(order)
        self.ready: set[int] = set()
        self.calls: list[Call] = []


class Call:
    """A collective: the inputs of all ranks, and their arrival times at each rank."""

    __slots__ = (
        *("arrivals", "ended", "endings", "comm", "inputs", "key", "inline"),
        "number",
    )

    def __init__(self, comm: SimulatedComm, number: int, key: CallKey, inline: bool):
        self.comm, self.number = comm, number
        self.key, self.inline = key, inline
        self.inputs: dict[int, Any] = {}  # the input of each worker
        self.ended: dict[int, Any] = {}
        # For each pair (from, to), the arrival time of the input, and that of the
        # message that the sender has its result.
        self.arrivals: dict[tuple[int, int], float] = {}
        self.endings: dict[tuple[int, int], float] = {}

    def peers(self, worker: int, group: int) -> tuple[int, ...]:
        """Returns the workers with which a worker exchanges inputs."""
        order = self.comm.order
        if group == 1 or self.key[0] != "step":
            return order
        return tuple(w for w in order if w % group == worker % group)

    def value(self) -> CallKey:
        """Returns the result of the call: the contributors and the data."""
        order = self.comm.order
        if self.key[0] == "sync":
            return (order, self.inputs[order[0]])
        samples = number = 0
        for worker in order:
            mask, resize = self.inputs.get(worker, (0, 0))
            if samples & mask:
                raise Violation(f"I6: a sample twice in {self.key}: {self.inputs}")
            samples |= mask
            number = max(number, resize)
        return (order, samples, number, self.comm.epoch)
