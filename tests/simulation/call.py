"""The collectives of job.py: inputs, when they arrive, and results."""

from __future__ import annotations

from typing import Any

Key = tuple[Any, ...]


class Violation(AssertionError):
    """An invariant does not hold."""


class Generation:
    """The communicator of one epoch, as all its members build it."""

    __slots__ = ("calls", "epoch", "order", "ready", "size")

    def __init__(self, epoch: int, order: tuple[int, ...]) -> None:
        self.epoch, self.order, self.size = epoch, order, len(order)
        self.ready: set[int] = set()
        self.calls: list[Call] = []


class Call:
    """One collective: what every rank gave, and when it reaches whom."""

    __slots__ = (
        *("arrivals", "ended", "endings", "generation", "inputs", "key", "note"),
        "number",
    )

    def __init__(self, generation: Generation, number: int, key: Key, note: bool):
        self.generation, self.number = generation, number
        self.key, self.note = key, note
        self.inputs: dict[int, Any] = {}  # by worker
        self.ended: dict[int, Any] = {}
        # (from, to) -> when: of inputs, and of the news that results are complete.
        self.arrivals: dict[tuple[int, int], float] = {}
        self.endings: dict[tuple[int, int], float] = {}

    def peers(self, worker: int, group: int) -> tuple[int, ...]:
        """Those that a worker exchanges values with."""
        order = self.generation.order
        if group == 1 or self.key[0] != "step":
            return order
        return tuple(w for w in order if w % group == worker % group)

    def value(self) -> Key:
        """What the ranks get: who contributed, and what came out."""
        order = self.generation.order
        if self.key[0] == "sync":
            return (order, self.inputs[order[0]])
        samples = number = 0
        for worker in order:
            mask, wish = self.inputs.get(worker, (0, 0))
            if samples & mask:
                raise Violation(f"I6: a sample twice in {self.key}: {self.inputs}")
            samples |= mask
            number = max(number, wish)
        return (order, samples, number, self.generation.epoch)
