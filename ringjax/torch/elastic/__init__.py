"""Elastic training of PyTorch models: `run`, `TorchState`, `ElasticSampler`.

Horovod's module path; the loop is `ringjax.elastic`.
"""

from __future__ import annotations

from ringjax.elastic import Checkpointer, run, run_fn
from ringjax.torch.elastic.sampler import ElasticSampler
from ringjax.torch.elastic.state import (
    TorchState,
    get_handler_registry,
    set_handler_registry,
)

__all__ = [
    "Checkpointer",
    "ElasticSampler",
    "TorchState",
    "get_handler_registry",
    "run",
    "run_fn",
    "set_handler_registry",
]
