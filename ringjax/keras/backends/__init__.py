"""Selects the module for the backend of Keras: TensorFlow, JAX or PyTorch.

Keras chooses its backend once, when it is imported (KERAS_BACKEND). Only the modules in
this folder differ between backends, and only the module of the chosen one is imported.
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
    """Returns the backend that this program's Keras uses.

    Raises:
        RuntimeError: the backend cannot train (numpy, openvino).

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
