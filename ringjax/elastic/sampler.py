"""ElasticSampler: every rank's part of the samples, cut anew when the ranks change.

Not a loader: it gives indices only, and knows no framework. The order of an epoch is
drawn from seed and epoch alone; which part of it is done is a number and, if ranks were
lost, a short list. So all ranks know it without a word between them.
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
    """Gives each rank its share of the indices that no rank has processed this epoch.

    Make it an attribute of a `State`, call `record_batch` after every step, and
    `set_epoch` at the end of every epoch. Then every sample is in exactly one committed
    step of an epoch, whatever happens to ranks: what a lost rank had in a step that the
    others finished without it comes again later, and a restart from a commit returns
    what came after the commit.

    All ranks make the same number of steps. So in the last step of an epoch (and of the
    samples that remained when ranks changed) ranks that would be short get some samples
    again; these fill the batch and do not count.

    Args:
        dataset: anything with a constant length, or the length.
        shuffle: whether every epoch has a random order.
        seed: of the random order; the same on all ranks.

    Attributes:
        epoch: the one that the order is for.
        processed_num: how far the ranks together have come in the order.
        num_samples: how many this rank gets.

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
        self.wait: Callable[[], None] | None = None  # for the step to be finished
        self._returned: list[int] = []  # places in the order before processed_num
        self._drawn: tuple[Any, Indices] | None = None
        self._taken = 0  # of this rank's share, and of all the others'
        self.num_samples = 0
        self.reset()

    @property
    def processed_indices(self) -> set[int]:
        """What all ranks together have processed this epoch."""
        order = self._order()
        done = set(order[: self.processed_num].tolist())
        return done - set(order[self._returned].tolist())

    @property
    def remaining_indices(self) -> list[int]:
        """What was not processed when the ranks' shares were cut."""
        remaining: list[int] = self._order()[self._places].tolist()
        return remaining

    @property
    def finished(self) -> bool:
        """Whether every sample of the epoch has been processed."""
        return self.processed_num >= self._count() and not self._returned

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch with nothing processed.

        Call it at the end of the one before: at its beginning, an epoch that was
        interrupted would start from nothing.
        """
        self.epoch = epoch
        self.processed_num = 0
        self._returned = []
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that every rank has taken the next `batch_size` samples of its share.

        In an elastic job it counts only those of the ranks whose contribution is in the
        step's result. So call it after the step's allreduce and before any other
        collective; with JAX, after the results were assigned to the `State` that holds
        the sampler, which waits for them here.

        Args:
            batch_idx: not looked at; Horovod has it.
            batch_size: the same on all ranks.
        """
        if self.wait is not None and sync_plan.current_plan() is not None:
            self.wait()
        start, stop = self._taken, self._taken + batch_size
        self._taken = stop
        absent = sync_plan.absent_from_last_call()
        known = len(self._places)
        if absent:
            first, last = min(start, self.num_samples), min(stop, self.num_samples)
            steps = np.arange(first, last)[:, None] * self.num_replicas
            shares = steps + np.arange(self.num_replicas)
            gone = np.isin(np.arange(self.num_replicas), sorted(absent))
            missed = shares[:, gone].ravel()
            missed = missed[missed < known]  # those after are repetitions
            self._missed.update(missed.tolist())
        if self._missed and stop * self.num_replicas > known:
            self._fill_up(start, stop, absent)
        self._count_processed()

    def _fill_up(self, start: int, stop: int, absent: frozenset[int]) -> None:
        """A repetition that a living rank had makes good what a lost one missed."""
        for step in range(start, min(stop, self.num_samples)):
            for share in range(self.num_replicas):
                place = step * self.num_replicas + share
                if place >= len(self._places) and share not in absent:
                    self._missed.discard(place % len(self._places))

    def _count_processed(self) -> None:
        taken = self._taken * self.num_replicas
        ahead = sorted(self._missed) + list(range(taken, self._returned_at_cut))
        self._returned = self._places[ahead].tolist() if ahead else []
        beyond = max(0, taken - self._returned_at_cut)
        self.processed_num = self._processed_at_cut + beyond

    def state_dict(self) -> dict[str, Any]:
        """Epoch, how far it has come, and which places before that come again."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "returned": list(self._returned),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues there, with what remains cut into as many parts as ranks are."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self._returned = list(state_dict.get("returned", ()))
        self.reset()

    def reset(self) -> None:
        """Cuts what remains into as many parts as there are ranks now."""
        agreed = sync_plan.current_plan()
        # In an elastic job not what this rank happens to know: all must cut alike.
        self.rank, self.num_replicas = (
            (runtime.rank(), runtime.size()) if agreed is None else agreed.share
        )
        ahead = np.arange(min(self.processed_num, self._count()), self._count())
        self._places: Indices = np.concatenate(
            [np.array(sorted(self._returned), np.int64), ahead]
        )
        self._returned_at_cut = len(self._returned)
        self._processed_at_cut = self.processed_num
        self._taken = 0
        self._missed: set[int] = set()  # places of `_places` that lost ranks had
        self.num_samples = -(-len(self._places) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def batches(self, size: int) -> Iterator[Indices]:
        """This rank's share in arrays of `size` indices; the last one may be shorter.

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
        what = (self.shuffle, self.seed, self.epoch, self._count())
        if self._drawn is None or self._drawn[0] != what:
            order = list(range(self._count()))
            if self.shuffle:
                random.Random(self.seed + self.epoch).shuffle(order)
            self._drawn = what, np.array(order, np.int64)
        return self._drawn[1]

    def _share(self) -> Indices:
        # More than once around, if there are more ranks than samples left.
        mine = np.arange(self.rank, self.total_size, self.num_replicas)
        return self._order()[self._places[mine % max(len(self._places), 1)]]

    def __iter__(self) -> Iterator[int]:
        self.indices: list[int] = self._share().tolist()
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
