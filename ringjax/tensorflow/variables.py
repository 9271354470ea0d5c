"""Helpers for variables of TensorFlow, and for Keras variables that wrap them.

Keras 3 wraps a `tf.Variable` in a class of its own. All functions of ringjax that read
or write variables take variables of both classes. This module does not import Keras.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
import tensorflow as tf

from ringjax.tensorflow.tf_types import Variable


def unwrap_variable(variable: object) -> tf.Variable:
    """Returns the `tf.Variable` in a variable of Keras, and any other object itself."""
    if isinstance(variable, tf.Variable):
        return variable
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def variable_key(variable: Variable) -> Hashable:
    """Returns a key that is equal for a variable of Keras and the `tf.Variable` in it.

    The key keeps the variable alive, so no other variable can have an equal key.
    """
    plain = unwrap_variable(variable)
    ref = getattr(plain, "ref", None)
    key: Hashable = ref() if callable(ref) else id(plain)
    return key


def as_variable_list(variables: Iterable[Variable] | Variable) -> list[tf.Variable]:
    """Returns TensorFlow's own variables of an iterable, or of a single variable."""
    if isinstance(variables, Iterable) and not isinstance(variables, tf.Variable):
        return [unwrap_variable(variable) for variable in variables]
    return [unwrap_variable(variables)]


def shape_and_dtype(tensor: tf.Tensor) -> tuple[tuple[int, ...], type[np.generic]]:
    """Returns the shape of a tensor, or () if it is unknown, and NumPy's dtype."""
    shape = tensor.shape
    known = tuple(shape.as_list()) if shape.is_fully_defined() else ()
    return known, tensor.dtype.as_numpy_dtype
