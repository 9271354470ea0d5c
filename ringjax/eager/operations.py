"""How operations on arrays run: arguments become memory, and memory results.

The public functions are in reductions.py and movement.py. The argument checks that need
no other rank and no knowledge of the framework are the core's (`CheckSubmission`); the
ranks' agreement is negotiation's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ringjax import runtime
from ringjax.eager import lane
from ringjax.eager.arrays import Array, Operand, operand
from ringjax.eager.lane import Handle


def first(results: list[Any]) -> Any:
    """The result of an operation on one array."""
    return results[0]


def operands(op: str, name: str | None, tensors: Sequence[Any]) -> list[Operand]:
    """The arguments of a grouped operation as memory."""
    if not isinstance(tensors, list | tuple) or not tensors:
        raise ValueError(
            f"{lane.title(op, name)}: expected a list or tuple of tensors, not empty"
        )
    return [operand(op, name, tensor) for tensor in tensors]


def reduce(
    op: str,
    tensors: Sequence[Any],
    name: str | None,
    reduce_op: int,
    prescale: float,
    postscale: float,
    process_set: runtime.ProcessSet,
    result: Callable[[list[Any]], Any],
) -> Handle:
    """Submits an allreduce or reducescatter."""
    runtime.lane(process_set, op)  # not initialised, or not a member
    given = operands(op, name, tensors)
    shapes = [
        lane.own_rows(op, name, g.piece, process_set)
        if op == "reducescatter"
        else g.array.shape
        for g in given
    ]
    outs = [g.like(shape) for g, shape in zip(given, shapes, strict=True)]
    return submit(
        *(op, name, given, outs, process_set, result),
        reduce_op=lane.reduce_op(op, reduce_op),
        prescale=lane.as_float(op, "prescale_factor", prescale),
        postscale=lane.as_float(op, "postscale_factor", postscale),
    )


def submit(
    op: str,
    name: str | None,
    given: list[Operand],
    outs: list[Array],
    process_set: runtime.ProcessSet,
    result: Callable[[list[Any]], Any],
    **call: Any,
) -> Handle:
    """Submits what writes its results into memory of ours, `outs`."""

    def finish(_: Any) -> Any:
        return result([g.restore(o) for g, o in zip(given, outs, strict=True)])

    return lane.submit(
        op,
        name,
        [g.piece for g in given],
        [out.ctypes.data for out in outs],
        finish=finish,
        process_set=process_set,
        keep=([g.array for g in given], outs),
        **call,
    )


def gather(
    tensors: Sequence[Any],
    name: str | None,
    process_set: runtime.ProcessSet,
    result: Callable[[list[Any]], Any],
) -> Handle:
    """Submits an allgather."""
    given = operands("allgather", name, tensors)
    pieces = [lane.with_rows("allgather", name, g.piece) for g in given]

    def finish(ticket: Any) -> Any:
        return result(
            [
                g.adopt(ticket.output(i), sum(ticket.received(i)))
                for i, g in enumerate(given)
            ]
        )

    return lane.submit(
        *("allgather", name, pieces, []),
        finish=finish,
        process_set=process_set,
        keep=[g.array for g in given],
    )
