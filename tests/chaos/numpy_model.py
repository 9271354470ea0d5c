"""The model of the chaos tests that do not import jax; compare model.py.

Gradients are small whole numbers as in model.py. The optimizer is momentum in NumPy,
which rounds equally in every process. A new worker starts in a third of the time that
JAX needs, so a soak test can kill more workers in an hour.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

# The mark of worker n is in slot n % MARK_SLOTS. Far fewer workers live at one time, so
# no two living workers have the same slot.
MARK_SLOTS = 8192
SHAPES = {"w": (257,), "b": (33, 3), "large": (9001,)}  # 37 kB, no inline data

Array = np.ndarray[Any, Any]
Tree = dict[str, Any]


def initial_state() -> tuple[Tree, Tree]:
    """Returns the parameters and the momentum before step 0."""
    params = {
        name: np.full(shape, (i + 1) / 8, np.float32)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    return params, {n: np.zeros(shape, np.float32) for n, shape in SHAPES.items()}


def gradients(params: Tree, worker: int, step: int) -> Tree:
    """Computes the gradients of a worker in a step: whole numbers between -6 and 6."""
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
    """Returns an array whose mean over workers shows which workers contributed.

    Row 0 has a one, and row 1 the number of the worker, at the slot of the worker.
    """
    slot = np.arange(MARK_SLOTS) == worker % MARK_SLOTS
    return np.stack([slot, slot * worker]).astype(np.float32)


def workers_marked_in(mean: Array) -> list[int]:
    """Returns the workers whose marks are in a mean; none may have been added twice."""
    slots = np.flatnonzero(mean[0])
    share = np.float32(1) / np.float32(len(slots))
    assert (mean[0][slots] == share).all(), f"a mean of {len(slots)}: {mean[0][slots]}"
    return [round(float(x) * len(slots)) for x in mean[1][slots]]


def optimizer_step(params: Tree, momentum: Tree, mean: Tree) -> tuple[Tree, Tree]:
    """Returns the parameters and the momentum after the gradients `mean`."""
    rate, decay = np.float32(1 / 64), np.float32(0.875)
    momentum = {name: decay * momentum[name] + mean[name] for name in SHAPES}
    params = {name: params[name] - rate * momentum[name] for name in SHAPES}
    return params, momentum


def digest(params: Tree) -> str:
    """Hashes the bits of all parameters."""
    text = b"".join(np.asarray(params[name]).tobytes() for name in SHAPES)
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def mean_of(total: Array, ranks: int) -> Array:
    """Divides a sum by the number of ranks with one rounding, as ringjax does."""
    return total / np.float32(ranks)


class Replay:
    """Computes all steps in one process.

    Example:
        >>> replay = Replay()
        >>> one = replay.step([0, 1])
        >>> other = Replay().step([0, 2])
        >>> one == other
        False
    """

    def __init__(self) -> None:
        self.steps = 0
        self._params, self._state = self._initial_state()

    def step(self, workers: list[int]) -> str:
        """Makes the next step with `workers`; returns the digest of the parameters."""
        total = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for worker in workers:
            for name, part in self._gradients(worker).items():
                total[name] += np.asarray(part)
        mean = {name: mean_of(x, len(workers)) for name, x in total.items()}
        self._params, self._state = self._optimizer_step(mean)
        self.steps += 1
        return digest(self._params)

    def _initial_state(self) -> tuple[Any, Any]:
        return initial_state()

    def _gradients(self, worker: int) -> Any:
        return gradients(self._params, worker, self.steps)

    def _optimizer_step(self, mean: Tree) -> tuple[Any, Any]:
        return optimizer_step(self._params, self._state, mean)
