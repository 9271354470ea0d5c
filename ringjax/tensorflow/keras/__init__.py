"""Horovod's API for Keras in TensorFlow: `import ringjax.tensorflow.keras as hvd`.

Since Keras 3, `tf.keras` is `keras`, and this package is `ringjax.keras`. It runs on
TensorFlow, or on another backend that KERAS_BACKEND names.
"""

from __future__ import annotations

from typing import Any

from ringjax import keras as _keras
from ringjax.keras import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # Each backend has a class of its own.
    if name == "Compression":
        return _keras.Compression
    raise AttributeError(f"module 'ringjax.tensorflow.keras' has no attribute {name!r}")
