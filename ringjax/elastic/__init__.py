"""Elastic training: a state that survives the loss of ranks, and the loop around it.

A program needs `run` and `State`. `ElasticSampler` distributes the remaining samples
after ranks join or leave, and `Checkpointer` writes to disk. The package imports no
framework.
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
