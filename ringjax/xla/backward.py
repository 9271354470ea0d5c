"""Where in the backward pass a bucket starts, when a step is lowered for a GPU.

XLA schedules for the least memory. Where weight gradients are no smaller than the
activations they set free, it computes all of them after everything else, and every
START with them. So a START is put right behind the operation that completes its bucket,
and one value that the next bucket still waits for goes through a barrier together with
the START's order value: XLA must then launch the START first. Nothing is copied and
nothing is computed twice. It knows MLIR, and nothing of buckets or calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

ir = mlir.ir


class BackwardPass:
    """The operations of the block that is being lowered, before any more are added."""

    def __init__(self, leaves: Sequence[Any], after: Sequence[Any]) -> None:
        """The STARTs of `leaves` stay behind the values `after`."""
        block = ir.InsertionPoint.current.block
        self._operations = [x.operation for x in block.operations]
        self._places = {x: i for i, x in enumerate(self._operations)}
        self._leaves = {leaf: self._place(leaf) for leaf in leaves}
        self._last = max((self._place(value) for value in after), default=-1)

    def _place(self, value: Any) -> int:
        """-1 for the block's arguments and for values from around it."""
        if isinstance(value.owner, ir.Block):
            return -1
        return self._places.get(value.owner.operation, -1)

    @contextlib.contextmanager
    def insert_after(self, leaves: Sequence[Any]) -> Iterator[None]:
        """Emits right behind `leaves` and whatever was emitted here before."""
        self._last = max([self._last, *(self._leaves[leaf] for leaf in leaves)])
        if self._last + 1 < len(self._operations):
            with ir.InsertionPoint(self._operations[self._last + 1]):
                yield
        else:
            yield

    def delay(self, order: Any, waiting: Sequence[Any]) -> Any:
        """Holds back what `waiting` is computed from until `order` exists.

        To be called inside `insert_after`; returns what has the place of `order`.
        """
        gate = self._newest_input(waiting)
        if gate is None:
            return order
        uses = [(use.owner.operation, use.operand_number) for use in gate.uses]
        barrier: Any = stablehlo.optimization_barrier([gate, order])
        held, order = barrier
        for operation, number in uses:
            place = self._places.get(operation, -1)
            if place > self._last:
                operation.operands[number] = held
                self._places[operation] = place  # its hash covers its operands
        return order

    def _newest_input(self, waiting: Sequence[Any]) -> Any:
        """The newest value that the rest of the way to `waiting` needs: a cotangent."""
        todo = [x.owner for x in waiting if self._leaves[x] > self._last]
        seen, found = set(), {}
        while todo:
            operation = todo.pop().operation
            if operation in seen:
                continue
            seen.add(operation)
            for value in operation.operands:
                place = self._place(value)
                if place > self._last:
                    todo.append(value.owner)
                elif place >= 0 and _is_tensor(value) and value not in self._leaves:
                    found[value] = place
        return max(found, key=found.__getitem__, default=None)


def _is_tensor(value: Any) -> bool:
    """Computed, and in floating point: no index, no constant, nothing spread out."""
    spread = ("stablehlo.constant", "stablehlo.broadcast_in_dim", "stablehlo.iota")
    return (
        isinstance(value.type, ir.RankedTensorType)
        and isinstance(value.type.element_type, ir.FloatType)
        and value.owner.operation.name not in spread
    )
