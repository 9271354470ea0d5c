"""Horovod's small functions that programs import from horovod.tensorflow.util.

No other module of ringjax uses them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

_executing_eagerly = tf.executing_eagerly
_make_subgraph = tf.function


def vars_to_refs(variables: Iterable[Any]) -> tuple[Any, ...]:
    """Returns references to variables, in nested tuples, as keys for a dict.

    Example:
        >>> v = tf.Variable(1.0)
        >>> refs_to_vars(vars_to_refs([v]))[0] is v
        True
    """
    return tuple(
        vars_to_refs(v) if isinstance(v, list | tuple) else v.ref() for v in variables
    )


def refs_to_vars(references: Iterable[Any]) -> list[Any]:
    """Undoes `vars_to_refs`."""
    return [
        refs_to_vars(r) if isinstance(r, list | tuple) else r.deref()
        for r in references
    ]
