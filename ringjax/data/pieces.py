"""Pieces: the indices of the samples of every piece of every step.

They depend on the number of the step and on the piece alone, and not on the ranks. So a
job needs no sampler whose position must be kept: the position is the number of the
step, also after ranks were lost, and after a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]


class Pieces:
    """Divides the samples into steps and pieces, for `ringjax.pieces.step`.

    The steps take the samples in a random order, which is another one in every epoch.
    Samples that do not fill a batch at the end of an epoch are left out, so that all
    pieces have equally many samples.

    Args:
        dataset: an object with a length, or the number of samples.
        batch: the number of samples of a step, a multiple of `pieces`.
        pieces: the number of pieces of a step.
        seed: seeds the order.
        shuffle: whether the order is random.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> pieces = Pieces(10, batch=4, pieces=2, shuffle=False)
        >>> pieces.rows(0, 1).tolist(), pieces.rows(1, 0).tolist()
        ([2, 3], [4, 5])
        >>> pieces.steps_per_epoch, pieces.epoch(5)
        (2, 2)
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch: int,
        pieces: int = 12,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.count = dataset if isinstance(dataset, int) else len(dataset)
        self.batch, self.pieces = batch, pieces
        self.seed, self.shuffle = seed, shuffle
        if pieces < 1:
            raise ValueError(f"Pieces: pieces is {pieces}, expected at least 1")
        if batch < 1 or batch % pieces:
            near = max(round(batch / pieces), 1) * pieces
            raise ValueError(
                f"Pieces: batch is {batch}, expected a multiple of the {pieces} "
                f"pieces, such as {near}"
            )
        if self.count < batch:
            raise ValueError(
                f"Pieces: {self.count} samples do not fill a batch of {batch}"
            )
        self._order: tuple[int, Indices] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in which every sample is used at most once."""
        return self.count // self.batch

    def epoch(self, number: int) -> int:
        """Returns the epoch of a step."""
        return number // self.steps_per_epoch

    def rows(self, number: int, piece: int) -> Indices:
        """Returns int64[batch / pieces], the indices of the samples of one piece.

        Args:
            number: the number of the step, from 0.
            piece: from 0 to pieces - 1.
        """
        if number < 0 or not 0 <= piece < self.pieces:
            raise ValueError(
                f"Pieces.rows: step {number} and piece {piece}, expected a step from 0 "
                f"and a piece from 0 to {self.pieces - 1}"
            )
        epoch, step = divmod(int(number), self.steps_per_epoch)
        size = self.batch // self.pieces
        start = step * self.batch + int(piece) * size
        return self._order_of(epoch)[start : start + size]

    def _order_of(self, epoch: int) -> Indices:
        if self._order is None or self._order[0] != epoch:
            order = np.arange(self.count)
            if self.shuffle:
                np.random.default_rng([self.seed, epoch]).shuffle(order)
            self._order = epoch, order
        return self._order[1]
