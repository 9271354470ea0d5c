"""Names for types of TensorFlow and Keras in annotations.

TensorFlow has no type stubs, so for a type checker `tf.Tensor` and the names below are
Any. For a reader, the names describe the objects that a function accepts.
"""

from __future__ import annotations

from typing import Any, TypeAlias

TensorLike: TypeAlias = Any
"""A `tf.Tensor`, or a variable, array or number that TensorFlow can convert to one."""

Gradient: TypeAlias = Any
"""A `tf.Tensor`, `tf.IndexedSlices`, or None if there is no gradient."""

Variable: TypeAlias = Any
"""A `tf.Variable`, or a `keras.Variable` that holds one."""

Splits: TypeAlias = Any
"""A list, array or tensor of integers: the rows for each rank, or None."""

Structure: TypeAlias = Any
"""Tensors or variables in nested lists, tuples and dicts, as `tf.nest` accepts them."""

Groups: TypeAlias = Any
"""Horovod's `groups`: a number, lists of variables, or None."""

Optimizer: TypeAlias = Any
"""A `tf.compat.v1.train.Optimizer` or a `keras.optimizers.Optimizer`."""

Server: TypeAlias = Any
"""A DispatchServer or WorkerServer of `tf.data.experimental.service`."""
