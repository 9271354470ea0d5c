"""Elastic training: state that outlives the loss of ranks, and the loop around it.

`run` and `State` are what a program needs; `ElasticSampler` shares samples out anew
when ranks come and go, and `Checkpointer` writes to disk. Imports no framework.
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
