"""TensorFlow's tensors that have values, as memory for the eager lane, and back.

Nothing is copied on the way there: the core reads what the tensor refers to. Results
are in memory of numpy's, aligned so that TensorFlow takes it over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringjax.eager import dtypes, lane
from ringjax.tensorflow import nodes
from ringjax.tensorflow.c_api import CORE_DTYPES

_ALIGNMENT = 64  # of TensorFlow's tensors, in bytes
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"

Array = np.ndarray[Any, Any]


def given(
    op: str, name: str | None, tensors: Sequence[Any]
) -> tuple[list[lane.TensorRef], list[Array]]:
    """What the lane wants to know of tensors, and their memory, to be kept.

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
        pieces.append((address(array), number, array.shape))
    return pieces, arrays


def address(array: Array) -> int:
    """Where an array is."""
    where: int = array.__array_interface__["data"][0]
    return where


def empty(shape: Sequence[int], dtype: Any) -> Array:
    """Memory that TensorFlow takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    block = np.empty(size + _ALIGNMENT, np.uint8)
    start = -address(block) % _ALIGNMENT
    array: Array = block[start : start + size].view(dtype).reshape(shape)
    return array


def tensor_of(array: Array, dtype: int) -> Any:
    """An array as a tensor; nobody may write to it any more."""
    return nodes.tensor_in(array, _CPU, dtype)


def rows_of(memory: Any, rows: int, like: Array) -> Array:
    """`rows` rows in memory of the core, which the array keeps alive."""
    shape = (rows, *like.shape[1:])
    if not math.prod(shape):
        return np.empty(shape, like.dtype)
    return np.frombuffer(memory, np.uint8).view(like.dtype).reshape(shape)


def with_values(tensors: Sequence[Any]) -> bool:
    """Whether all of them have values, and are no mere places in a graph."""
    return all(isinstance(tensor, nodes.EagerTensor) for tensor in tensors)


def as_tensors(values: Sequence[Any]) -> list[Any]:
    """Tensors of what TensorFlow makes tensors of: variables, arrays, numbers."""
    return [
        value if isinstance(value, nodes.EagerTensor) else tf.convert_to_tensor(value)
        for value in values
    ]
