"""The model of the chaos tests: every step can be computed again bit by bit.

A worker's gradients are small whole numbers that depend on the worker, the step and the
parameters. So their sums are exact in float32 in every order of addition. A step that
is lost, done twice or done with other ranks changes all later steps, and one process
can repeat the training of many. Adam and its state are as in any training. The mean is
one division. The optimizer is a compiled program of its own, both in the ranks and in
the repetition, because XLA might fuse it differently with the code before it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from chaos import numpy_model
from chaos.numpy_model import PLACES, SHAPES, digest, marked

__all__ = ["PLACES", "Replay", "apply", "digest", "first", "gradients"]
__all__ += ["marked", "marks"]

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
    """Computes a worker's gradients of a step: whole numbers between -6 and 6."""
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
    """An array whose mean over workers shows them: a one and the worker's number."""
    here = jnp.arange(PLACES) == worker % PLACES
    return jnp.stack([here, here * worker]).astype(jnp.float32)


@jax.jit
def apply(params: Tree, state: Any, mean: Tree) -> tuple[Tree, Any]:
    """Makes a step of the optimizer."""
    updates, state = TX.update(mean, state, params)
    return optax.apply_updates(params, updates), state


_gradients = jax.jit(gradients)


class Replay(numpy_model.Replay):
    """Repeats all steps in one process, with jax.

    Example:
        >>> replay = Replay()
        >>> one = replay.step([0, 1])
        >>> other = Replay().step([0, 2])
        >>> one == other
        False
    """

    def _first(self) -> tuple[Tree, Any]:
        return first()

    def _gradients(self, worker: int) -> Tree:
        found: Tree = _gradients(self._params, jnp.int32(worker), jnp.int32(self.steps))
        return found

    def _apply(self, mean: Tree) -> tuple[Tree, Any]:
        return apply(self._params, self._state, mean)
