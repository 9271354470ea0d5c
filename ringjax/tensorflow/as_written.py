"""Functions that AutoGraph leaves as they are.

Inside a `tf.function` AutoGraph rewrites the source of all that is called, which takes
seconds for ringjax's and changes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., Any])


def as_written(function: F) -> F:
    """Decorates what programs call; what it calls is left as it is, too."""
    marked: Any = tf.autograph.experimental.do_not_convert(function)
    # `tf.function(marked)` would look behind it, and rewrite what it finds there.
    marked.__signature__ = inspect.signature(function)
    del marked.__wrapped__
    kept: F = marked
    return kept
