"""Distributes data over ranks: shards of datasets, samplers, prefetching loaders.

The package works with tf.data, grain, PyTorch and plain iterators, and imports no
framework until a program uses `even_steps`, which needs JAX. When ranks join or leave
within an epoch, `ElasticSampler` distributes the remaining samples.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ringjax.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from ringjax.data.pieces import Pieces
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
    "Pieces",
    "even_steps",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name != "even_steps":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("ringjax.data.steps").even_steps
