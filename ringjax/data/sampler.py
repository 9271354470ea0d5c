"""DistributedSampler: this rank's indices of every epoch, for loaders of any framework.

The ranks must not change within an epoch. For jobs in which ranks join and leave, use
`ringjax.elastic.ElasticSampler`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized

import numpy as np

from ringjax import runtime


class DistributedSampler:
    """Yields each rank's share of the indices, in an order that is equal on all ranks.

    The arguments and attributes are those of PyTorch's sampler. A DistributedSampler
    can be the ``sampler`` of a `DataLoader`, but does not need PyTorch.

    Args:
        dataset: an object with a length, or the number of samples.
        num_replicas: the number of ranks that share the samples; by default all ranks.
        rank: the rank that gets the share; by default this rank.
        shuffle: whether every epoch has a random order.
        seed: the seed of the random order, equal on all ranks.
        drop_last: if the samples cannot be divided evenly: True drops the last samples,
            and False repeats the first samples.

    Raises:
        ValueError: a number is out of range.
        NotInitialized: before `init`, if `num_replicas` or `rank` is None.

    Example:
        >>> [list(DistributedSampler(5, 2, r, shuffle=False)) for r in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
        >>> len(DistributedSampler(5, 2, 0, drop_last=True))
        2
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset = dataset
        self.num_replicas = runtime.size() if num_replicas is None else num_replicas
        self.rank = runtime.rank() if rank is None else rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        if self.num_replicas < 1:
            raise ValueError(
                f"DistributedSampler: num_replicas is {self.num_replicas}, expected at "
                "least 1"
            )
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(
                f"DistributedSampler: rank is {self.rank}, expected 0 to "
                f"{self.num_replicas - 1}"
            )
        if isinstance(dataset, int) and dataset < 0:
            raise ValueError(f"DistributedSampler: {dataset} samples")

    @property
    def num_samples(self) -> int:
        """The number of indices of each rank in an epoch."""
        each = self._count() / self.num_replicas
        return math.floor(each) if self.drop_last else math.ceil(each)

    @property
    def total_size(self) -> int:
        """The number of indices of all ranks in an epoch."""
        return self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Selects the order of an epoch. All ranks call this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self._count())
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch]).shuffle(order)
        if len(order):
            # np.resize repeats the first samples, or drops the last samples.
            order = np.resize(order, self.total_size)
        share: list[int] = order[self.rank :: self.num_replicas].tolist()
        return iter(share)

    def _count(self) -> int:
        return self.dataset if isinstance(self.dataset, int) else len(self.dataset)
