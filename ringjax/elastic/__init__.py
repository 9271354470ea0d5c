"""Elastic training: training continues when ranks are lost, join or leave.

A program needs `run`, which calls the training function, and `State`, which holds the
training state. `ElasticSampler` distributes the remaining samples after ranks join or
leave, and `Checkpointer` writes the state to disk. The package imports no framework.
"""

from __future__ import annotations

from ringjax.elastic.checkpointer import Checkpointer
from ringjax.elastic.loop import reset, run, run_fn
from ringjax.elastic.notifications import (
    HostUpdateResult,
    Listener,
    WorkerNotificationManager,
    notification_manager,
)
from ringjax.elastic.sampler import ElasticSampler
from ringjax.elastic.state import ObjectState, State

__all__ = [
    "Checkpointer",
    "ElasticSampler",
    "HostUpdateResult",
    "Listener",
    "ObjectState",
    "State",
    "WorkerNotificationManager",
    "notification_manager",
    "reset",
    "run",
    "run_fn",
]
