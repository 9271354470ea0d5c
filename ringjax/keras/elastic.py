"""Elastic training with `model.fit`: KerasState, and callbacks that update it.

The module path is Horovod's; `ringjax.elastic` runs the training function.
"""

from __future__ import annotations

from ringjax.elastic import run, run_fn
from ringjax.keras.elastic_state import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
    "run_fn",
]
