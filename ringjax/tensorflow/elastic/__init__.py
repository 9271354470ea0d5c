"""Elastic training in TensorFlow: `run`, `TensorFlowState`, `TensorFlowKerasState`.

The module path is Horovod's. The training loop is `ringjax.elastic.run`.
"""

from __future__ import annotations

from ringjax.elastic import Checkpointer, ObjectState, run, run_fn
from ringjax.tensorflow.elastic.state import TensorFlowKerasState, TensorFlowState

__all__ = [
    "Checkpointer",
    "ObjectState",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
    "run_fn",
]
