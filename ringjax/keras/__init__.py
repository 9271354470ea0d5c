"""Horovod's Keras API (`import ringjax.keras as hvd`) for Keras 3 on three backends.

Keras uses TensorFlow, JAX or PyTorch (KERAS_BACKEND); no other framework is imported.
On JAX the gradients are reduced inside of the train step that Keras compiles.
"""

from __future__ import annotations

from typing import Any

from ringjax.horovod.api import *  # noqa: F403
from ringjax.keras import callbacks as callbacks
from ringjax.keras import elastic as elastic
from ringjax.keras.backends import backend
from ringjax.keras.operations import allgather as allgather
from ringjax.keras.operations import allreduce as allreduce
from ringjax.keras.operations import broadcast as broadcast
from ringjax.keras.operations import (
    broadcast_global_variables as broadcast_global_variables,
)
from ringjax.keras.operations import reducescatter as reducescatter
from ringjax.keras.optimizer import DistributedOptimizer as DistributedOptimizer
from ringjax.keras.optimizer import (
    PartialDistributedOptimizer as PartialDistributedOptimizer,
)
from ringjax.keras.saving import load_model as load_model
from ringjax.runtime import refuse_groups as _refuse_groups

_refuse_groups("ringjax.keras")


def __getattr__(name: str) -> Any:
    # Each backend has a class of its own.
    if name == "Compression":
        return backend().compression
    raise AttributeError(f"module 'ringjax.keras' has no attribute {name!r}")
