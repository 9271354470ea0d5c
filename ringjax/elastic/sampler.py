"""Distributes the indices of samples to ranks, again after each change of the ranks.

The sampler yields indices and loads no data. The order of the samples depends only on
the seed and the epoch of training. A position in this order and, if ranks were lost, a
short list describe which samples are processed. So all ranks compute equal shares
without communication.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np

from ringjax import runtime
from ringjax.elastic import sync_plan

Indices = np.ndarray[Any, np.dtype[np.int64]]


class ElasticSampler:
    """Gives each rank a share of the indices that are not yet processed in this epoch.

    Make the sampler an attribute of a `State`, call `record_batch` after every step,
    and `set_epoch` at the end of every epoch. Then every sample is in exactly one
    committed step of an epoch, even if ranks are lost: the samples of a rank that was
    lost during a step are distributed again later. A restart from a commit repeats the
    samples after the commit.

    All ranks make the same number of steps. If the samples cannot be divided evenly,
    some ranks receive some samples again in the last step. These samples fill the batch
    and do not count.

    Args:
        dataset: an object with a constant length, or the length itself.
        shuffle: whether every epoch has a random order.
        seed: the seed of the random order, equal on all ranks.

    Attributes:
        epoch: the current epoch.
        processed_num: the position that all ranks together have reached in the order
            of the samples.
        num_samples: the number of samples of this rank.

    Raises:
        NotInitialized: before `init`.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> sampler = ringjax.elastic.ElasticSampler(5, shuffle=False)
        >>> for step, rows in enumerate(sampler.batches(2)):
        ...     sampler.record_batch(step, len(rows))  # after the step with these rows
        ...     break
        >>> sampler.reset()
        >>> list(sampler)
        [2, 3, 4]
    """

    def __init__(
        self, dataset: Sized | int, shuffle: bool = True, seed: int = 0
    ) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        # A function that waits until the step has finished.
        self.wait: Callable[[], None] | None = None
        # Positions before processed_num whose samples must be distributed again.
        self._returned: list[int] = []
        self._drawn: tuple[tuple[bool, int, int, int], Indices] | None = None
        self._taken = 0  # samples that each rank has taken from its share
        self.num_samples = 0
        self.reset()

    @property
    def processed_indices(self) -> set[int]:
        """The indices that all ranks together have processed in this epoch."""
        order = self._order()
        done = set(order[: self.processed_num].tolist())
        return done - set(order[self._returned].tolist())

    @property
    def remaining_indices(self) -> list[int]:
        """The indices that were not processed when samples were distributed last."""
        remaining: list[int] = self._order()[self._positions].tolist()
        return remaining

    @property
    def finished(self) -> bool:
        """Whether every sample of the epoch has been processed."""
        return self.processed_num >= self._count() and not self._returned

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch without processed samples.

        Call this method at the end of the previous epoch. A call at the beginning of an
        epoch would discard the progress of an interrupted epoch.
        """
        self.epoch = epoch
        self.processed_num = 0
        self._returned = []
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that every rank has processed its next `batch_size` samples.

        In an elastic job, only samples of ranks that contributed to the result of the
        last collective count. So call this method after the allreduce of the step and
        before any other collective. With JAX, first assign the results to the `State`
        that holds the sampler, because this method waits for the arrays of the `State`.

        Args:
            batch_idx: ignored; Horovod has this argument.
            batch_size: equal on all ranks.
        """
        if self.wait is not None and sync_plan.current_plan() is not None:
            self.wait()
        start, stop = self._taken, self._taken + batch_size
        self._taken = stop
        absent = sync_plan.absent_from_last_call()
        # Shares are interleaved: in step s, rank r has position s * num_replicas + r.
        known = len(self._positions)
        if absent:
            first, last = min(start, self.num_samples), min(stop, self.num_samples)
            steps = np.arange(first, last)[:, None] * self.num_replicas
            shares = steps + np.arange(self.num_replicas)
            is_absent = np.isin(np.arange(self.num_replicas), sorted(absent))
            missed = shares[:, is_absent].ravel()
            # Positions from `known` on only fill batches with repeated samples, so do
            # not distribute them again.
            missed = missed[missed < known]
            self._missed.update(missed.tolist())
        if self._missed and stop * self.num_replicas > known:
            self._fill_up(start, stop, absent)
        self._count_processed()

    def _fill_up(self, start: int, stop: int, absent: frozenset[int]) -> None:
        """Counts samples of lost ranks that have filled batches of other ranks."""
        for step in range(start, min(stop, self.num_samples)):
            for share in range(self.num_replicas):
                position = step * self.num_replicas + share
                if position >= len(self._positions) and share not in absent:
                    self._missed.discard(position % len(self._positions))

    def _count_processed(self) -> None:
        taken = self._taken * self.num_replicas
        # The first _returned_at_reset entries of _positions lie before processed_num.
        # Distribute again the entries that no rank has taken yet, and those of lost
        # ranks.
        ahead = sorted(self._missed) + list(range(taken, self._returned_at_reset))
        self._returned = self._positions[ahead].tolist() if ahead else []
        beyond = max(0, taken - self._returned_at_reset)
        self.processed_num = self._processed_at_reset + beyond

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, the position, and earlier positions not yet processed."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "returned": list(self._returned),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state, and distributes the remaining samples."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self._returned = list(state_dict.get("returned", ()))
        self.reset()

    def reset(self) -> None:
        """Distributes the remaining samples to the current ranks."""
        plan = sync_plan.current_plan()
        # In an elastic job, ranks notice a loss at different times, so use the rank and
        # the size in the sync plan, which is equal on all ranks.
        self.rank, self.num_replicas = (
            (runtime.rank(), runtime.size()) if plan is None else plan.position
        )
        ahead = np.arange(min(self.processed_num, self._count()), self._count())
        self._positions: Indices = np.concatenate(
            [np.array(sorted(self._returned), np.int64), ahead]
        )
        self._returned_at_reset = len(self._returned)
        self._processed_at_reset = self.processed_num
        self._taken = 0
        # Indices into _positions of samples that lost ranks had taken.
        self._missed: set[int] = set()
        self.num_samples = -(-len(self._positions) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def batches(self, size: int) -> Iterator[Indices]:
        """Yields this rank's share as arrays of at most `size` indices.

        Example:
            >>> import ringjax
            >>> ringjax.init()
            >>> sampler = ringjax.elastic.ElasticSampler(5, shuffle=False)
            >>> [rows.tolist() for rows in sampler.batches(3)]
            [[0, 1, 2], [3, 4]]
        """
        share = self._share()
        for start in range(0, len(share), size):
            yield share[start : start + size]

    def _count(self) -> int:
        return self.dataset if isinstance(self.dataset, int) else len(self.dataset)

    def _order(self) -> Indices:
        key = (self.shuffle, self.seed, self.epoch, self._count())
        if self._drawn is None or self._drawn[0] != key:
            order = list(range(self._count()))
            if self.shuffle:
                random.Random(self.seed + self.epoch).shuffle(order)
            self._drawn = key, np.array(order, np.int64)
        return self._drawn[1]

    def _share(self) -> Indices:
        # The modulo repeats samples, because there may be fewer samples than ranks.
        own = np.arange(self.rank, self.total_size, self.num_replicas)
        return self._order()[self._positions[own % max(len(self._positions), 1)]]

    def __iter__(self) -> Iterator[int]:
        self.indices: list[int] = self._share().tolist()
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
