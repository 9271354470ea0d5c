"""Names for types of TensorFlow and Keras in annotations.

TensorFlow has no type stubs, so a type checker takes its classes (`tf.Tensor`) and the
names below for Any. The names say what a function expects.
"""

from __future__ import annotations

from typing import Any, TypeAlias

TensorLike: TypeAlias = Any
"""A `tf.Tensor`, or what `tf.convert_to_tensor` takes: a variable, array or number."""

Gradient: TypeAlias = Any
"""A `tf.Tensor`, `tf.IndexedSlices`, or None if there is no gradient."""

Variable: TypeAlias = Any
"""A `tf.Variable`, or a `keras.Variable` that holds one."""

Splits: TypeAlias = Any
"""A list, array or tensor of integers: the rows for each rank, or None."""

Structure: TypeAlias = Any
"""Tensors or variables in nested lists, tuples and dicts, as `tf.nest` takes them."""

Groups: TypeAlias = Any
"""Horovod's `groups`: a number, lists of variables, or None."""

Optimizer: TypeAlias = Any
"""A `tf.compat.v1.train.Optimizer` or a `keras.optimizers.Optimizer`."""

Server: TypeAlias = Any
"""A DispatchServer or WorkerServer of `tf.data.experimental.service`."""
