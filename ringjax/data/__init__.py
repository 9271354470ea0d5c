"""Data for each rank: shards of anything, a sampler of indices, loaders in a thread.

For tf.data, grain, PyTorch and plain iterators; imports no framework, but JAX for
`even_steps`. When ranks come and go within an epoch, `ElasticSampler` shares out what
is left.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ringjax.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from ringjax.data.sampler import DistributedSampler
from ringjax.data.shards import shard
from ringjax.elastic import ElasticSampler

if TYPE_CHECKING:
    from ringjax.data.steps import even_steps as even_steps

__all__ = [
    "AsyncDataLoaderMixin",
    "BaseDataLoader",
    "DistributedSampler",
    "ElasticSampler",
    "even_steps",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name != "even_steps":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("ringjax.data.steps").even_steps
