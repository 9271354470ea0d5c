"""program.py FOLDER PAUSE: the program of the workers in a chaos test with JAX.

Its steps are compiled, as in a usual training. The loop is in loop.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax
from chaos import model
from chaos.loop import WORKER, Training


def main() -> None:
    """Trains until FOLDER/stop exists."""
    training = Training()
    tx = ringjax.allreduce_grads()
    params, opt = model.first()
    # Each worker adds a mark of its own to the gradients. The sum of the marks shows
    # exactly which workers took part in the step.
    extra = {"who": jnp.zeros((2, model.PLACES), jnp.float32)}
    state = ringjax.elastic.State(
        params=params, opt=opt, reduction=tx.init({**params, **extra}), step=0
    )

    @jax.jit
    def reduced(params: Any, reduction: Any, step: Any, worker: Any) -> Any:
        grads = model.gradients(params, worker, step)
        return tx.update({**grads, "who": model.marks(worker)}, reduction)

    def train_step(state: Any) -> list[int]:
        mean, state.reduction = reduced(
            state.params, state.reduction, jnp.int32(state.step), jnp.int32(WORKER)
        )
        marks = np.asarray(mean.pop("who"))
        state.params, state.opt = model.apply(state.params, state.opt, mean)
        jax.block_until_ready(state.params)
        return model.marked(marks)

    training.run(
        *(state, train_step),
        lambda note: ringjax.allreduce(note, op=ringjax.Sum),
        model.digest,
    )


main()
