"""program.py FOLDER PAUSE: the program of the workers in a chaos test with JAX.

The steps are compiled. The loop is in loop.py.
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
    params, opt = model.initial_state()
    # Each worker adds a mark of its own to the gradients. The mean of the marks shows
    # which workers took part in the step.
    extra = {"workers": jnp.zeros((2, model.MARK_SLOTS), jnp.float32)}
    state = ringjax.elastic.State(
        params=params, opt=opt, reduction=tx.init({**params, **extra}), step=0
    )

    @jax.jit
    def reduced(params: Any, reduction: Any, step: Any, worker: Any) -> Any:
        grads = model.gradients(params, worker, step)
        return tx.update({**grads, "workers": model.marks(worker)}, reduction)

    def train_step(state: Any) -> list[int]:
        mean, state.reduction = reduced(
            state.params, state.reduction, jnp.int32(state.step), jnp.int32(WORKER)
        )
        marks = np.asarray(mean.pop("workers"))
        state.params, state.opt = model.optimizer_step(state.params, state.opt, mean)
        jax.block_until_ready(state.params)
        return model.workers_marked_in(marks)

    training.run(
        *(state, train_step),
        lambda flags: ringjax.allreduce(flags, op=ringjax.Sum),
        model.digest,
    )


main()
