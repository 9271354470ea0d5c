"""Collectives outside of a `tf.function`: the thread that calls submits and waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringjax.eager import lane
from ringjax.errors import RingjaxError
from ringjax.tensorflow import tensors as memory
from ringjax.tensorflow.calls import Call
from ringjax.tensorflow.failures import as_tensorflow
from ringjax.world import timeouts

# Results, and for each the rows that came from every rank, where those may differ.
Results = tuple[list[Any], list[list[int]]]


def run(call: Call, tensors: Sequence[Any], splits: Sequence[int] = ()) -> Results:
    """Runs an operation on tensors with values.

    Raises:
        Exception: of ringjax and of TensorFlow in one, see failures.py.
    """
    try:
        if call.timeout == timeouts.JOBS:
            return _run(call, tensors, splits)
        with timeouts.collective_timeout(call.timeout):
            return _run(call, tensors, splits)
    except (RingjaxError, ValueError, TypeError) as error:
        raise as_tensorflow(error) from None


def _run(call: Call, tensors: Sequence[Any], splits: Sequence[int]) -> Results:
    op, name, process_set = call.op, call.name or None, call.members()
    pieces, arrays = memory.given(op, name, tensors)
    details = call.details(process_set)
    outs: list[memory.Array] = []
    if op in ("allreduce", "broadcast"):
        outs = [memory.empty(array.shape, array.dtype) for array in arrays]
    elif op == "reducescatter":
        outs = [
            memory.empty(
                lane.scattered_shape(op, name, piece, process_set), array.dtype
            )
            for piece, array in zip(pieces, arrays, strict=True)
        ]
    else:
        details["splits"] = splits
        for piece in pieces:
            lane.require_rows(op, name, piece)
    ticket = lane.submit(
        op,
        name,
        pieces,
        [memory.address(out) for out in outs],
        _itself,
        process_set,
        (arrays, outs),
        **(details | lane.WAITS),
    ).wait()
    received: list[list[int]] = []
    if not outs:
        received = [list(ticket.received(i)) for i in range(len(arrays))]
        outs = [
            memory.rows_of(ticket.output(i), sum(rows), array)
            for i, (rows, array) in enumerate(zip(received, arrays, strict=True))
        ]
    results = [
        memory.tensor_of(out, tensor._datatype_enum())
        for out, tensor in zip(outs, tensors, strict=True)
    ]
    return results, received


def _itself(ticket: Any) -> Any:
    return ticket
