"""What fails, in TensorFlow's exceptions as well as in ringjax's.

Horovod's operations raise TensorFlow's errors, so programs catch those: what the ranks
disagree about is a FailedPreconditionError, a bad argument an InvalidArgumentError, a
rank that is gone an UnknownError. Outside of a `tf.function` each of them is ringjax's
exception, too. Inside, only a code and a text come through TensorFlow;
`ringjax.elastic.run` makes ringjax's exception of those.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import tensorflow as tf

from ringjax.errors import Mismatch, NotInitialized, Stalled


def _kind_of(error: BaseException) -> Any:
    if isinstance(error, Mismatch | NotInitialized):
        return tf.errors.FailedPreconditionError
    if isinstance(error, ValueError | TypeError):
        return tf.errors.InvalidArgumentError
    if isinstance(error, Stalled):
        return tf.errors.DeadlineExceededError
    return tf.errors.UnknownError


def code_of(error: BaseException) -> int:
    """TensorFlow's code for an exception with which a node fails."""
    return int(_kind_of(error)(None, None, "").error_code)


@cache
def _both(kind: Any, theirs: Any) -> Any:
    """A class of exceptions that are `kind`, and TensorFlow's `theirs`."""

    def begin(self: Any, text: str) -> None:
        # Not through their __init__, which calls that of `kind` with other arguments.
        vars(self).update(vars(theirs(None, None, text)))

    def text_of(self: Any) -> str:
        return str(self.message)

    def reduce(self: Any) -> Any:
        plain = kind.__new__(kind, str(self))
        own = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        vars(plain).update(own)
        return as_tensorflow, (plain,)

    attributes = {
        "__init__": begin,
        "__str__": text_of,
        "__reduce__": reduce,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (theirs, kind), attributes)


def as_tensorflow(error: Exception) -> Exception:
    """The same failure, such that `except` clauses for TensorFlow's errors see it.

    Example:
        >>> error = as_tensorflow(Mismatch("shapes differ"))
        >>> isinstance(error, Mismatch), isinstance(error, RuntimeError)
        (True, True)
        >>> isinstance(error, tf.errors.FailedPreconditionError)
        True
    """
    already: bool = isinstance(error, tf.errors.OpError)
    if already:
        return error
    kind: Any = type(error)
    new: Exception = _both(kind, _kind_of(error))(str(error))
    for name, value in vars(error).items():
        setattr(new, name, value)
    return new
