"""Exceptions that are both ringjax's and TensorFlow's.

Horovod's operations raise TensorFlow's errors, so programs catch TensorFlow's errors. A
disagreement between ranks is a FailedPreconditionError, a bad argument an
InvalidArgumentError, and a lost rank an UnknownError. Outside of a `tf.function` the
exception is an instance of ringjax's class, too. TensorFlow passes only a code and a
text out of a function; `ringjax.elastic.run` converts the code and the text to
ringjax's exceptions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import tensorflow as tf

from ringjax.errors import Mismatch, NotInitialized, Stalled


def _error_class_of(error: BaseException) -> Any:
    if isinstance(error, Mismatch | NotInitialized):
        return tf.errors.FailedPreconditionError
    if isinstance(error, ValueError | TypeError):
        return tf.errors.InvalidArgumentError
    if isinstance(error, Stalled):
        return tf.errors.DeadlineExceededError
    return tf.errors.UnknownError


def error_code_of(error: BaseException) -> int:
    """Returns TensorFlow's code for the exception of a node."""
    return int(_error_class_of(error)(None, None, "").error_code)


@cache
def _combined_class(own: Any, op_error: Any) -> Any:
    """Makes a subclass of `own` and of `op_error`, an error class of TensorFlow."""

    def init(self: Any, text: str) -> None:
        # TensorFlow's __init__ would call the __init__ of `own` with arguments that it
        # does not accept. Copy the attributes of an `op_error` instead.
        vars(self).update(vars(op_error(None, None, text)))

    def to_text(self: Any) -> str:
        return str(self.message)

    def reduce(self: Any) -> tuple[object, tuple[Exception]]:
        # pickle cannot find this class by its name, so pickle an instance of `own`.
        plain = own.__new__(own, str(self))
        state = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        vars(plain).update(state)
        return to_tensorflow_error, (plain,)

    attributes = {
        "__init__": init,
        "__str__": to_text,
        "__reduce__": reduce,
        "__module__": own.__module__,
        "__doc__": own.__doc__,
    }
    return type(own.__name__, (op_error, own), attributes)


def to_tensorflow_error(error: Exception) -> Exception:
    """Returns an exception of the class of `error` and of a TensorFlow error class.

    Example:
        >>> error = to_tensorflow_error(Mismatch("shapes differ"))
        >>> isinstance(error, Mismatch), isinstance(error, RuntimeError)
        (True, True)
        >>> isinstance(error, tf.errors.FailedPreconditionError)
        True
    """
    already: bool = isinstance(error, tf.errors.OpError)
    if already:
        return error
    own: Any = type(error)
    new: Exception = _combined_class(own, _error_class_of(error))(str(error))
    for name, value in vars(error).items():
        setattr(new, name, value)
    return new
