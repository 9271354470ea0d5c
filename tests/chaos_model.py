"""What ranks train in the chaos tests: every step can be computed again bit by bit.

A worker's gradients are small whole numbers that depend on the worker, the step and the
parameters. So their sums are exact in float32 in whatever order they are added, a step
that is lost, done twice or done with other ranks changes all that follows, and one
process can repeat what many have done. Adam and its state are as in any training. The
mean is one division, and the optimizer is a compiled program of its
own, the same here and there: XLA might fuse it otherwise with what stands before it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

PLACES = 64  # for worker numbers modulo this: those alive at a time are neighbours
SHAPES = {"w": (257,), "b": (33, 3), "large": (9001,)}  # 37 kB: more than fits a note
TX = optax.adam(0.125)

Tree = dict[str, Any]


def first() -> tuple[Tree, Any]:
    """Parameters and the optimizer's state before step 0."""
    params = {
        name: jnp.full(shape, (i + 1) / 8, jnp.float32)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    return params, TX.init(params)


def gradients(params: Tree, worker: Any, step: Any) -> Tree:
    """One worker's gradients of a step: whole numbers between -6 and 6."""
    found = {}
    for i, (name, value) in enumerate(params.items()):
        index = jnp.arange(value.size, dtype=jnp.uint32).reshape(value.shape)
        mixed = index * np.uint32(2654435761) + step.astype(jnp.uint32) * np.uint32(
            40503
        )
        mixed += worker.astype(jnp.uint32) * np.uint32(69069) + np.uint32(i)
        mixed ^= mixed >> 15
        seen = jnp.clip(jnp.round(value * 16), -1e6, 1e6).astype(jnp.int32) % 5
        whole = (mixed % 9).astype(jnp.int32) - 4 + seen - 2
        found[name] = whole.astype(jnp.float32)
    return found


def marks(worker: Any) -> Any:
    """Tells, in a mean, who is in it: a one and the worker's number in its place."""
    here = jnp.arange(PLACES) == worker % PLACES
    return jnp.stack([here, here * worker]).astype(jnp.float32)


def marked(mean: np.ndarray[Any, Any]) -> list[int]:
    """The workers whose marks are in a mean; each one once, and divided by how many."""
    places = np.flatnonzero(mean[0])
    share = np.float32(1) / np.float32(len(places))
    assert (mean[0][places] == share).all(), (
        f"a mean of {len(places)}: {mean[0][places]}"
    )
    return [round(float(x) * len(places)) for x in mean[1][places]]


@jax.jit
def apply(params: Tree, state: Any, mean: Tree) -> tuple[Tree, Any]:
    """The optimizer's step."""
    updates, state = TX.update(mean, state, params)
    return optax.apply_updates(params, updates), state


def digest(params: Tree) -> str:
    """The same exactly if all bits are."""
    text = b"".join(np.asarray(params[name]).tobytes() for name in SHAPES)
    return hashlib.blake2b(text, digest_size=8).hexdigest()


_gradients = jax.jit(gradients)


class Replay:
    """All steps again, in one process.

    Example:
        >>> replay = Replay()
        >>> one = replay.step([0, 1])
        >>> other = Replay().step([0, 2])
        >>> one == other
        False
    """

    def __init__(self) -> None:
        self.steps = 0
        self._params, self._state = first()

    def step(self, workers: list[int]) -> str:
        """The next step, with these workers; returns the digest of the parameters."""
        total = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for worker in workers:
            found = _gradients(self._params, jnp.int32(worker), jnp.int32(self.steps))
            for name, part in total.items():
                part += np.asarray(found[name])
        mean = {
            name: jnp.asarray(mean_of(x, len(workers))) for name, x in total.items()
        }
        self._params, self._state = apply(self._params, self._state, mean)
        self.steps += 1
        return digest(self._params)


def mean_of(total: np.ndarray[Any, Any], ranks: int) -> np.ndarray[Any, Any]:
    """A sum as ringjax makes it a mean, rounded once."""
    return total / np.float32(ranks)
