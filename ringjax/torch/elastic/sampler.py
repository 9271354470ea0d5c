"""ElasticSampler: every rank's part of a dataset, cut anew when the ranks change.

Not a loader: it gives indices only. What was processed is a number, because the ranks
take turns in one common order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from ringjax import runtime


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank its share of the indices that no rank has processed this epoch.

    Put it into a `TorchState`, call `record_batch` after every batch, and `set_epoch`
    at the end of every epoch. Ranks that would be some samples short get the first ones
    of the others again, so that all make the same number of steps.

    Args:
        dataset: anything with a constant length.
        shuffle: whether every epoch has a random order.
        seed: of the random order; the same on all ranks.

    Attributes:
        epoch: the one that the order is for.
        processed_num: how many of the order all ranks together have processed.
        remaining_indices: what they have not.
        num_samples: how many this rank gets.

    Raises:
        NotInitialized: before `init`.

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
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    @property
    def processed_indices(self) -> set[int]:
        """What all ranks together have processed this epoch."""
        return set(self._order()[: self.processed_num])

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch with nothing processed.

        Call it at the end of the one before: at its beginning, an epoch that was
        interrupted would start from nothing.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that every rank has processed a batch of `batch_size`."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Epoch and number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues there, with what remains cut into as many parts as ranks are."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Cuts what remains into as many parts as there are ranks now."""
        self.num_replicas = runtime.size()
        self.rank = runtime.rank()
        self.remaining_indices = self._order()[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _order(self) -> list[int]:
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        return order

    def __iter__(self) -> Iterator[int]:
        # More than once around, if there are more ranks than samples left.
        around = itertools.cycle(self.remaining_indices)
        padded = itertools.islice(around, self.total_size)
        self.indices = list(padded)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
