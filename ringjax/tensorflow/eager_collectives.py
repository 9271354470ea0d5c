"""Collectives outside of a `tf.function`: the calling thread submits and waits.

The core reads the memory of an argument in place. A result is an array of NumPy, which
is aligned so that TensorFlow uses its memory without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from ringjax.eager import dtypes, lane, result_memory
from ringjax.errors import RingjaxError
from ringjax.tensorflow import tf_private
from ringjax.tensorflow.c_api import CORE_DTYPES
from ringjax.tensorflow.collective_spec import CollectiveSpec, finish_with_work
from ringjax.tensorflow.failures import to_tensorflow_error

_ALIGNMENT = 64  # bytes of alignment; TensorFlow copies memory that is aligned less
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"

Array: TypeAlias = np.ndarray[Any, Any]

Results: TypeAlias = tuple[list[tf.Tensor], list[list[int]]]
"""The results, and for each result of allgather and alltoall the rows by rank."""


def run(
    call: CollectiveSpec, tensors: Sequence[tf.Tensor], splits: Sequence[int] = ()
) -> Results:
    """Runs a collective on eager tensors; raises the exceptions of failures.py."""
    try:
        return _run(call, tensors, splits)
    except (RingjaxError, ValueError, TypeError) as error:
        raise to_tensorflow_error(error) from None


def _run(
    call: CollectiveSpec, tensors: Sequence[tf.Tensor], splits: Sequence[int]
) -> Results:
    op, name, process_set = call.op, call.name or None, call.process_set()
    pieces, arrays = describe_tensors(op, name, tensors)
    arguments = call.lane_arguments(process_set)
    outs: list[Array] = []
    if op in ("allreduce", "broadcast"):
        outs = [_empty_aligned(array.shape, array.dtype) for array in arrays]
    elif op == "reducescatter":
        for piece, array in zip(pieces, arrays, strict=True):
            shape = lane.scattered_shape(op, name, piece, process_set)
            outs.append(_empty_aligned(shape, array.dtype))
    else:
        arguments["splits"] = splits
        for piece in pieces:
            lane.require_rows(op, name, piece)
    work = lane.submit(
        op,
        name,
        pieces,
        [address_of(out) for out in outs],
        finish_with_work,
        process_set,
        keep=(arrays, outs),
        **(arguments | lane.WAITS),
    ).wait()
    received: list[list[int]] = []
    if not outs:
        received = [list(work.received(i)) for i in range(len(arrays))]
        outs = [
            _rows_from_memory(work.output(i), sum(rows), array)
            for i, (rows, array) in enumerate(zip(received, arrays, strict=True))
        ]
    # The tensors may share the memory of these arrays, so nothing writes to the arrays.
    results = [
        tf_private.wrap_array(out, _CPU, tensor._datatype_enum())
        for out, tensor in zip(outs, tensors, strict=True)
    ]
    return results, received


def describe_tensors(
    op: str, name: str | None, tensors: Sequence[tf.Tensor]
) -> tuple[list[lane.TensorRef], list[Array]]:
    """Returns address, dtype and shape of tensors, and the arrays at these addresses.

    The caller keeps the arrays alive until the operation has ended. A dtype that cannot
    be sent causes a TypeError.
    """
    pieces: list[lane.TensorRef] = []
    arrays: list[Array] = []
    for tensor in tensors:
        number = CORE_DTYPES.get(tensor._datatype_enum())
        if number is None:
            raise TypeError(
                f"{lane.title(op, name)}: {tensor.dtype!r} cannot be sent (shape "
                f"{list(tensor.shape)}), expected one of {', '.join(dtypes.NUMBERS)}"
            )
        array = tensor._numpy_internal()
        if type(array) is not np.ndarray:  # a scalar
            array = np.asarray(array)
        arrays.append(array)
        pieces.append((address_of(array), number, array.shape))
    return pieces, arrays


def address_of(array: Array) -> int:
    """Returns the address of the first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def _empty_aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Returns an uninitialised array whose memory TensorFlow can use without a copy."""
    size = math.prod(shape) * dtype.itemsize
    block = result_memory.empty((size + _ALIGNMENT,), np.dtype(np.uint8))
    start = -address_of(block) % _ALIGNMENT
    array: Array = block[start : start + size].view(dtype).reshape(shape)
    return array


def _rows_from_memory(memory: memoryview, rows: int, like: Array) -> Array:
    """Returns an array of `rows` rows that keeps the core's `memory` alive."""
    shape = (rows, *like.shape[1:])
    if not math.prod(shape):
        return np.empty(shape, like.dtype)
    return np.frombuffer(memory, np.uint8).view(like.dtype).reshape(shape)
