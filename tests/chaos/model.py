"""The model of the chaos tests: one process can compute every step again, bit for bit.

The gradients of a worker are small whole numbers that depend on the worker, the step
and the parameters. Therefore their sums are exact in float32 in every order of
addition, and a step that is lost, made twice or made with other ranks changes all later
steps. The mean is one division, and the optimizer is Adam. The update of the optimizer
is a compiled program of its own, both in the ranks and in the replay, because XLA might
fuse the update differently with the code before it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from chaos import numpy_model
from chaos.numpy_model import MARK_SLOTS, SHAPES, digest, workers_marked_in

__all__ = ["MARK_SLOTS", "Replay", "digest", "gradients", "initial_state"]
__all__ += ["marks", "optimizer_step", "workers_marked_in"]

OPTIMIZER = optax.adam(0.125)

Tree = dict[str, Any]


def initial_state() -> tuple[Tree, Any]:
    """Returns the parameters and the optimizer state before step 0."""
    params = {
        name: jnp.full(shape, (i + 1) / 8, jnp.float32)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    return params, OPTIMIZER.init(params)


def gradients(params: Tree, worker: Any, step: Any) -> Tree:
    """Computes the gradients of a worker in a step: whole numbers between -6 and 6."""
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
    """Returns an array whose mean over workers shows which workers contributed.

    Row 0 has a one, and row 1 the number of the worker, at the slot of the worker.
    """
    slot = jnp.arange(MARK_SLOTS) == worker % MARK_SLOTS
    return jnp.stack([slot, slot * worker]).astype(jnp.float32)


@jax.jit
def optimizer_step(params: Tree, state: Any, mean: Tree) -> tuple[Tree, Any]:
    """Returns the parameters and the optimizer state after the gradients `mean`."""
    updates, state = OPTIMIZER.update(mean, state, params)
    return optax.apply_updates(params, updates), state


_gradients = jax.jit(gradients)


class Replay(numpy_model.Replay):
    """Computes all steps in one process, with JAX.

    Example:
        >>> replay = Replay()
        >>> one = replay.step([0, 1])
        >>> other = Replay().step([0, 2])
        >>> one == other
        False
    """

    def _initial_state(self) -> tuple[Tree, Any]:
        return initial_state()

    def _gradients(self, worker: int) -> Tree:
        found: Tree = _gradients(self._params, jnp.int32(worker), jnp.int32(self.steps))
        return found

    def _optimizer_step(self, mean: Tree) -> tuple[Tree, Any]:
        return optimizer_step(self._params, self._state, mean)
