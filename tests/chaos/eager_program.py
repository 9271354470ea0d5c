"""eager_program.py FOLDER PAUSE: like program.py, with named operations on numpy.

No framework is imported, so newcomers start faster. Membership, recovery, pauses and
the transfer of the state are those of program.py. After a loss, calls of the eager lane
are repeated.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import ringjax
from chaos import numpy_model as model
from chaos.loop import WORKER, Training
from ringjax import eager

if len(sys.argv) <= 3:  # checkpoints are Orbax's, which imports jax
    from support import numpy_only

    assert numpy_only  # this import refuses later imports of frameworks


def main() -> None:
    """Trains until FOLDER/stop exists."""
    training = Training()
    params, momentum = model.first()
    state = ringjax.elastic.State(params=params, momentum=momentum, step=0)

    def train_step(state: Any) -> list[int]:
        grads = model.gradients(state.params, WORKER, state.step)
        grads["who"] = model.marks(WORKER)  # all arrays in one call
        found = eager.grouped_allreduce(list(grads.values()), name="gradients")
        mean = dict(zip(grads, map(np.asarray, found), strict=True))
        marks = mean.pop("who")
        state.params, state.momentum = model.apply(state.params, state.momentum, mean)
        return model.marked(marks)

    training.run(
        *(state, train_step),
        lambda note: eager.allreduce(note, op=ringjax.Sum, name="note"),
        model.digest,
    )


main()
