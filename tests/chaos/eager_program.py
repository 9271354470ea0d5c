"""eager_program.py FOLDER PAUSE: like program.py, but with named operations on NumPy.

The program imports no framework, so new workers start faster. Membership, recovery,
pauses and the transfer of the state are those of program.py. The calls that run again
after a loss are those of the eager lane.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import ringjax
from chaos import numpy_model as model
from chaos.loop import WORKER, Training
from ringjax import eager

if len(sys.argv) <= 3:  # the third argument asks for checkpoints: Orbax imports jax
    from support import numpy_only

    assert numpy_only  # the module refuses later imports of frameworks


def main() -> None:
    """Trains until FOLDER/stop exists."""
    training = Training()
    params, momentum = model.initial_state()
    state = ringjax.elastic.State(params=params, momentum=momentum, step=0)

    def train_step(state: Any) -> list[int]:
        grads = model.gradients(state.params, WORKER, state.step)
        grads["workers"] = model.marks(WORKER)  # all arrays in one call
        found = eager.grouped_allreduce(list(grads.values()), name="gradients")
        mean = dict(zip(grads, map(np.asarray, found), strict=True))
        marks = mean.pop("workers")
        state.params, state.momentum = model.optimizer_step(
            state.params, state.momentum, mean
        )
        return model.workers_marked_in(marks)

    training.run(
        *(state, train_step),
        lambda flags: eager.allreduce(flags, op=ringjax.Sum, name="flags"),
        model.digest,
    )


main()
