"""Inserts STARTs of gradient buckets into the backward pass, in programs for GPUs.

XLA schedules for the least memory. If weight gradients are not smaller than the
activations that they free, XLA computes all weight gradients last, and runs every START
only then. So this module inserts a START right after the operation that completes its
bucket. One value that the next bucket still needs passes through an optimization
barrier together with the START's order value, so that XLA must launch the START first.
No value is copied or computed twice. This module knows MLIR, but no buckets or calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from ringjax.xla.jax_types import IrValue

ir = mlir.ir


class BackwardPass:
    """The operations of the MLIR block that is lowered, before a START is inserted.

    `leaves` are the operands of the STARTs. The first START follows the values `after`.
    """

    def __init__(self, leaves: Sequence[IrValue], after: Sequence[IrValue]) -> None:
        block = ir.InsertionPoint.current.block
        self._operations = [x.operation for x in block.operations]
        self._positions = {x: i for i, x in enumerate(self._operations)}
        self._leaves = {leaf: self._position(leaf) for leaf in leaves}
        self._last = max((self._position(value) for value in after), default=-1)

    def _position(self, value: IrValue) -> int:
        """Returns the position in the block, or -1 for arguments and other blocks."""
        if isinstance(value.owner, ir.Block):
            return -1
        return self._positions.get(value.owner.operation, -1)

    @contextlib.contextmanager
    def insert_after(self, leaves: Sequence[IrValue]) -> Iterator[None]:
        """Emits operations right after `leaves`, and after all earlier insertions."""
        self._last = max([self._last, *(self._leaves[leaf] for leaf in leaves)])
        if self._last + 1 < len(self._operations):
            with ir.InsertionPoint(self._operations[self._last + 1]):
                yield
        else:
            yield

    def delay(self, order: IrValue, waiting: Sequence[IrValue]) -> IrValue:
        """Delays the computation of `waiting` until `order` exists.

        Call `delay` inside `insert_after`. Returns the value to use instead of `order`.
        """
        newest = self._newest_input(waiting)
        if newest is None:
            return order
        uses = [(use.owner.operation, use.operand_number) for use in newest.uses]
        barrier: Any = stablehlo.optimization_barrier([newest, order])
        results: list[IrValue] = list(barrier)
        for operation, number in uses:
            position = self._positions.get(operation, -1)
            if position > self._last:
                operation.operands[number] = results[0]
                # The hash of an operation depends on its operands, which have changed.
                self._positions[operation] = position
        return results[1]

    def _newest_input(self, waiting: Sequence[IrValue]) -> IrValue | None:
        """Returns the last computed value, a cotangent, that `waiting` still needs."""
        todo: list[Any] = [x.owner for x in waiting if self._leaves[x] > self._last]
        seen, found = set(), {}
        while todo:
            operation = todo.pop().operation
            if operation in seen:
                continue
            seen.add(operation)
            for value in operation.operands:
                position = self._position(value)
                if position > self._last:
                    todo.append(value.owner)
                elif position >= 0 and _is_tensor(value) and value not in self._leaves:
                    found[value] = position
        return max(found, key=found.__getitem__, default=None)


def _is_tensor(value: Any) -> bool:
    """Returns True if `value` is a tensor of floats and not a constant."""
    constant = ("stablehlo.constant", "stablehlo.broadcast_in_dim", "stablehlo.iota")
    return (
        isinstance(value.type, ir.RankedTensorType)
        and isinstance(value.type.element_type, ir.FloatType)
        and value.owner.operation.name not in constant
    )
