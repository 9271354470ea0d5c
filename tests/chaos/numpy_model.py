"""The model of the chaos tests that do not import jax; compare model.py.

Gradients are small whole numbers again, and the optimizer is momentum, line by line in
numpy, which rounds the same in every process. A newcomer needs a third of the time to
start, so that more can be killed in an hour.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

PLACES = 8192  # a worker's mark is at its number modulo this; living workers differ
SHAPES = {
    "w": (257,),
    "b": (33, 3),
    "large": (9001,),
}  # 37 kB: too large for inline data

Array = np.ndarray[Any, Any]
Tree = dict[str, Any]


def first() -> tuple[Tree, Tree]:
    """Parameters and momentum before step 0."""
    params = {
        name: np.full(shape, (i + 1) / 8, np.float32)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    return params, {n: np.zeros(shape, np.float32) for n, shape in SHAPES.items()}


def gradients(params: Tree, worker: int, step: int) -> Tree:
    """Computes a worker's gradients of a step: whole numbers between -6 and 6."""
    found = {}
    salt = (worker * 69069 + step * 40503) % 2**32
    for i, (name, value) in enumerate(params.items()):
        index = np.arange(value.size, dtype=np.uint32).reshape(value.shape)
        mixed = index * np.uint32(2654435761) + np.uint32((salt + i) % 2**32)
        mixed ^= mixed >> np.uint32(15)
        seen = np.clip(np.round(value * 16), -1e6, 1e6).astype(np.int32) % 5
        whole = (mixed % 9).astype(np.int32) - 4 + seen - 2
        found[name] = whole.astype(np.float32)
    return found


def marks(worker: int) -> Array:
    """An array whose mean over workers shows them: a one and the worker's number."""
    here = np.arange(PLACES) == worker % PLACES
    return np.stack([here, here * worker]).astype(np.float32)


def marked(mean: Array) -> list[int]:
    """The workers whose marks are in a mean. Checks that each contributed once."""
    places = np.flatnonzero(mean[0])
    share = np.float32(1) / np.float32(len(places))
    assert (mean[0][places] == share).all(), (
        f"a mean of {len(places)}: {mean[0][places]}"
    )
    return [round(float(x) * len(places)) for x in mean[1][places]]


def apply(params: Tree, momentum: Tree, mean: Tree) -> tuple[Tree, Tree]:
    """Makes a step of the optimizer."""
    rate, kept = np.float32(1 / 64), np.float32(0.875)
    momentum = {name: kept * momentum[name] + mean[name] for name in SHAPES}
    params = {name: params[name] - rate * momentum[name] for name in SHAPES}
    return params, momentum


def digest(params: Tree) -> str:
    """A hash of all parameter bits: equal hashes mean equal parameters."""
    text = b"".join(np.asarray(params[name]).tobytes() for name in SHAPES)
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def mean_of(total: Array, ranks: int) -> Array:
    """Divides a sum by the number of ranks like ringjax, with one rounding."""
    return total / np.float32(ranks)


class Replay:
    """Repeats all steps in one process.

    Example:
        >>> replay = Replay()
        >>> one = replay.step([0, 1])
        >>> other = Replay().step([0, 2])
        >>> one == other
        False
    """

    def __init__(self) -> None:
        self.steps = 0
        self._params, self._state = self._first()

    def step(self, workers: list[int]) -> str:
        """Makes the next step with these workers; returns the parameters' digest."""
        total = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for worker in workers:
            for name, part in self._gradients(worker).items():
                total[name] += np.asarray(part)
        mean = {name: mean_of(x, len(workers)) for name, x in total.items()}
        self._params, self._state = self._apply(mean)
        self.steps += 1
        return digest(self._params)

    def _first(self) -> tuple[Any, Any]:
        return first()

    def _gradients(self, worker: int) -> Any:
        return gradients(self._params, worker, self.steps)

    def _apply(self, mean: Tree) -> tuple[Any, Any]:
        return apply(self._params, self._state, mean)
