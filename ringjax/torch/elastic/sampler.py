"""Horovod's ElasticSampler: `ringjax.elastic.ElasticSampler` for a DataLoader."""

from __future__ import annotations

from collections.abc import Sized

import torch.utils.data

from ringjax import elastic


class ElasticSampler(elastic.ElasticSampler, torch.utils.data.Sampler[int]):
    """Gives each rank its share of the indices that no rank has processed this epoch.

    Put the sampler into a `TorchState`, call `record_batch` after every
    ``optimizer.step()``, and `set_epoch` at the end of every epoch. The guarantees are
    the same as for `ringjax.elastic.ElasticSampler`.

    Args:
        dataset: any object with a constant length.
        shuffle: whether every epoch has a random order.
        seed: the seed of the random order, the same on all ranks.

    Raises:
        NotInitialized: `init` was not called.

    Example:
        >>> import ringjax.torch as hvd
        >>> hvd.init()
        >>> sampler = hvd.elastic.ElasticSampler(range(5), shuffle=False)
        >>> sampler.record_batch(0, batch_size=2)
        >>> sampler.load_state_dict(sampler.state_dict())
        >>> list(sampler)
        [2, 3, 4]
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(dataset, shuffle, seed)
