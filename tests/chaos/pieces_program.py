"""pieces_program.py FOLDER PAUSE CHECKPOINTS MODEL SHARES: a training in pieces.

It is a program of chaos tests as program.py. CHECKPOINTS may be "". The digests of its
trace are those of the whole state of the training, and must be those of one process.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import ringjax
from chaos import numpy_model, piece_models
from chaos.loop import WORKER, Training
from ringjax import eager


def main() -> None:
    """Trains until FOLDER/stop exists."""
    training = Training()
    piece_models.share_by(sys.argv[5])
    step, params, load = piece_models.MODELS[sys.argv[4]]()

    def train_step(state: Any) -> list[int]:
        state.params, _ = step(state.params, load)
        marks = eager.allreduce(numpy_model.marks(WORKER), name="marks")
        return numpy_model.workers_marked_in(np.asarray(marks))

    training.run(
        *(ringjax.elastic.State(params=params, step=0), train_step),
        lambda flags: eager.allreduce(flags, op=ringjax.Sum, name="flags"),
        piece_models.digest,
    )


main()
