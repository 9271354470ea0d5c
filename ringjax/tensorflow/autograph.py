"""Excludes ringjax's functions from AutoGraph.

Inside a `tf.function`, AutoGraph rewrites the source of every function that is called.
For ringjax's functions the rewriting would take seconds and change nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., Any])


def do_not_convert(function: F) -> F:
    """Decorates a function so that AutoGraph rewrites neither it nor its callees."""
    marked = tf.autograph.experimental.do_not_convert(function)
    # `tf.function(marked)` would follow `__wrapped__` and rewrite the undecorated
    # function. Delete the attribute, but keep the signature, which depends on it.
    marked.__signature__ = inspect.signature(function)
    del marked.__wrapped__
    result: F = marked
    return result
