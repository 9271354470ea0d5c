"""Eager tensors as memory for the eager lane, and memory as eager tensors.

The core reads the memory of an argument in place. A result is an array of NumPy, and is
aligned so that TensorFlow takes it over without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from ringjax.eager import dtypes, lane
from ringjax.tensorflow import tf_private
from ringjax.tensorflow.c_api import CORE_DTYPES

_ALIGNMENT = 64  # bytes; TensorFlow copies memory that is aligned less
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"

Array: TypeAlias = np.ndarray[Any, Any]


def describe(
    op: str, name: str | None, tensors: Sequence[tf.Tensor]
) -> tuple[list[lane.TensorRef], list[Array]]:
    """Describes tensors for the lane.

    Returns:
        The address, dtype and shape of each tensor, and the arrays at these addresses.
        The caller keeps the arrays alive until the operation has ended.

    Raises:
        TypeError: a dtype cannot be sent.
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


def empty_aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Returns uninitialised memory that TensorFlow takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    block = np.empty(size + _ALIGNMENT, np.uint8)
    start = -address_of(block) % _ALIGNMENT
    array: Array = block[start : start + size].view(dtype).reshape(shape)
    return array


def to_tensor(array: Array, dtype: int) -> tf.Tensor:
    """Makes a tensor of an array, to which nobody may write any more."""
    return tf_private.wrap_array(array, _CPU, dtype)


def rows_from_memory(memory: memoryview, rows: int, like: Array) -> Array:
    """Makes an array of `rows` rows over memory of the core, and keeps that alive."""
    shape = (rows, *like.shape[1:])
    if not math.prod(shape):
        return np.empty(shape, like.dtype)
    return np.frombuffer(memory, np.uint8).view(like.dtype).reshape(shape)
