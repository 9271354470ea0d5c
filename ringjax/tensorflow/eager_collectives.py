"""Collectives outside of a `tf.function`: the calling thread submits and waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from ringjax.eager import lane
from ringjax.errors import RingjaxError
from ringjax.tensorflow import tensors as memory
from ringjax.tensorflow.collective_spec import CollectiveSpec, finish_with_work
from ringjax.tensorflow.failures import to_tensorflow_error

Results: TypeAlias = tuple[list[tf.Tensor], list[list[int]]]
"""The results, and for each result of allgather and alltoall the rows by rank."""


def run(
    call: CollectiveSpec, tensors: Sequence[tf.Tensor], splits: Sequence[int] = ()
) -> Results:
    """Runs a collective on eager tensors.

    Raises:
        Exception: an exception of ringjax and of TensorFlow in one, see failures.py.
    """
    try:
        return _run(call, tensors, splits)
    except (RingjaxError, ValueError, TypeError) as error:
        raise to_tensorflow_error(error) from None


def _run(
    call: CollectiveSpec, tensors: Sequence[tf.Tensor], splits: Sequence[int]
) -> Results:
    op, name, process_set = call.op, call.name or None, call.process_set()
    pieces, arrays = memory.describe(op, name, tensors)
    arguments = call.lane_arguments(process_set)
    outs: list[memory.Array] = []
    if op in ("allreduce", "broadcast"):
        outs = [memory.empty_aligned(array.shape, array.dtype) for array in arrays]
    elif op == "reducescatter":
        shapes = [
            lane.scattered_shape(op, name, piece, process_set) for piece in pieces
        ]
        outs = [
            memory.empty_aligned(shape, array.dtype)
            for shape, array in zip(shapes, arrays, strict=True)
        ]
    else:
        arguments["splits"] = splits
        for piece in pieces:
            lane.require_rows(op, name, piece)
    work = lane.submit(
        op,
        name,
        pieces,
        [memory.address_of(out) for out in outs],
        finish_with_work,
        process_set,
        keep=(arrays, outs),
        **(arguments | lane.WAITS),
    ).wait()
    received: list[list[int]] = []
    if not outs:
        received = [list(work.received(i)) for i in range(len(arrays))]
        outs = [
            memory.rows_from_memory(work.output(i), sum(rows), array)
            for i, (rows, array) in enumerate(zip(received, arrays, strict=True))
        ]
    results = [
        memory.to_tensor(out, tensor._datatype_enum())
        for out, tensor in zip(outs, tensors, strict=True)
    ]
    return results, received
