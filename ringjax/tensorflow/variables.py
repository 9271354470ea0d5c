"""What a variable is: TensorFlow's own, or one of Keras that holds such a one.

Keras 3 has a class of its own around a `tf.Variable`; everything in ringjax that stores
variables or writes into them takes either. Imports no Keras.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import tensorflow as tf


def unwrapped(variable: Any) -> Any:
    """The `tf.Variable` in a variable of Keras; anything else as it is.

    Example:
        >>> import tensorflow as tf
        >>> variable = tf.Variable(1.0)
        >>> unwrapped(variable) is variable
        True
    """
    if isinstance(variable, tf.Variable):
        return variable
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def key(variable: Any) -> Hashable:
    """What a variable is known by: equal for a variable of Keras and what it holds.

    Keeps the variable alive, so that no other one can take its place.

    Example:
        >>> import tensorflow as tf
        >>> variable = tf.Variable(1.0)
        >>> key(variable) == key(variable), key(variable) == key(tf.Variable(1.0))
        (True, False)
    """
    held = unwrapped(variable)
    ref = getattr(held, "ref", None)
    return ref() if callable(ref) else id(held)


def listed(variables: Any) -> list[Any]:
    """The variables as TensorFlow's own, also if it is one alone."""
    if isinstance(variables, Iterable) and not isinstance(variables, tf.Variable):
        return [unwrapped(one) for one in variables]
    return [unwrapped(variables)]


def shape_and_dtype(tensor: Any) -> tuple[tuple[int, ...], Any]:
    """What is known of a tensor before it has a value; () for an unknown shape."""
    shape = tensor.shape
    known = tuple(shape.as_list()) if shape.is_fully_defined() else ()
    return known, tensor.dtype.as_numpy_dtype
