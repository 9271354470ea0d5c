"""sweep_program.py STEPS MODEL…: prints digests of all kinds of shares.

A line has the model, the shares, the number of the last step, and the digest. With
STEPS = 0, the program instead makes one step of the only model for each line that it
reads, and prints its digest: the process with which all others are compared.
"""

from __future__ import annotations

import sys

import numpy as np

import ringjax
from chaos import piece_models
from chaos.piece_models import SHARES, Model, digest


def main() -> None:
    """Prints the digests."""
    steps, *names = sys.argv[1:]
    ringjax.init()
    for name in names:
        model = piece_models.MODELS[name]()
        if steps == "0":
            _answer(model)
        else:
            _sweep(name, model, int(steps))


def _answer(model: Model) -> None:
    step, training, load = model
    for _ in sys.stdin:
        training, out = step(training, load)
        assert all(map(np.isfinite, np.atleast_1d(out))), out
        print(digest(training), flush=True)


def _sweep(name: str, model: Model, steps: int) -> None:
    for shares in SHARES:
        piece_models.share_by(shares)
        model.step._plan = None  # it makes its shares anew
        training = model.training
        for _ in range(steps):
            training, _ = model.step(training, model.load)
        print(name, shares, steps, digest(training), flush=True)


main()
