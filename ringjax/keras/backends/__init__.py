"""What a backend of Keras must bring, and which one the program uses.

Keras decides once, when it is imported (KERAS_BACKEND); so is decided here. All that
differs between backends is in this folder; the rest of `ringjax.keras` knows none.
"""

from __future__ import annotations

import functools
import importlib

import keras

from ringjax.keras.backends.base_backend import Backend, ReductionOptions

__all__ = ["Backend", "ReductionOptions", "backend"]

_KNOWN = ("jax", "tensorflow", "torch")


@functools.cache
def backend() -> Backend:
    """The one that this program's Keras uses.

    Raises:
        RuntimeError: it is one that does not train (numpy, openvino).

    Example:
        >>> backend().name in ("jax", "tensorflow", "torch")
        True
    """
    name = keras.backend.backend()
    if name not in _KNOWN:
        raise RuntimeError(
            f"ringjax.keras: Keras uses the backend {name!r}, which does not train; "
            f"set KERAS_BACKEND to one of {', '.join(_KNOWN)}"
        )
    module = importlib.import_module(f"ringjax.keras.backends.{name}_backend")
    found: Backend = module.BACKEND
    return found
