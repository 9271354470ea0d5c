"""Data for each rank: shards of anything, a sampler of indices, loaders in a thread.

For tf.data, grain, PyTorch and plain iterators; imports no framework. When ranks come
and go within an epoch, `ElasticSampler` shares out what is left.
"""

from __future__ import annotations

from ringjax.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from ringjax.data.sampler import DistributedSampler
from ringjax.data.shards import shard
from ringjax.elastic import ElasticSampler

__all__ = [
    "AsyncDataLoaderMixin",
    "BaseDataLoader",
    "DistributedSampler",
    "ElasticSampler",
    "shard",
]
