"""Training whose result is the same, bit for bit, on any number of ranks.

    ringrun -np 1 --same-bits python same_bits.py
    ringrun -np 3 --same-bits python same_bits.py                  the same SHA-256
    ringrun -np 3 --min-np 1 --same-bits python same_bits.py       elastic: kill ranks

Each step has 12 pieces, and any rank can compute any piece. If a rank is lost, the
other ranks compute its pieces in the same step. The data are the handwritten digits of
`jax_digits.py`. Needs ``pip install "ringjax[examples]"``.

To go further: ``--pause 0.1`` leaves time to kill a rank, ``--checkpoints FOLDER`` lets
a stopped job continue on another number of ranks (``ringjax[checkpoint]``).
"""

from __future__ import annotations

import argparse
import hashlib
import time

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import ringjax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=96, help="images of a step")
parser.add_argument("--pieces", type=int, default=12, help="pieces of a step")
parser.add_argument("--pause", type=float, default=0.0, help="seconds after a step")
parser.add_argument("--checkpoints", help="a folder that all ranks share")
arguments = parser.parse_args()

ringjax.init()
digits = load_digits()
images = (digits.images[..., None] / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
pieces = ringjax.data.Pieces(len(images), arguments.batch, arguments.pieces)


class Network(nn.Module):
    """A network with two convolutions, dropout, and two dense layers."""

    @nn.compact
    def __call__(self, x):
        """Returns the logits of the ten digits."""
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=False)(x))


network = Network()


def load(number, piece):
    """Returns the data of a piece, which depend on nothing but step and piece."""
    rows = pieces.rows(number, piece)
    return images[rows], labels[rows]


def loss_of(params, data, key):
    logits = network.apply(params, data[0], rngs={"dropout": key})
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, data[1]).mean()
    return loss, (logits.argmax(-1) == data[1]).mean(dtype=np.float32)


step = ringjax.pieces.step(loss_of, optax.adam(2e-3), arguments.pieces, has_aux=True)


def one_step(state):
    state.training, (loss, accuracy) = step(state.training, load)
    return loss, accuracy


folder = arguments.checkpoints
checkpointer = ringjax.elastic.Checkpointer(folder, every=50) if folder else None


@ringjax.elastic.run(warm_up=one_step, checkpointer=checkpointer)
def train(state):
    while (number := int(state.training.number)) < arguments.steps:
        loss, accuracy = one_step(state)
        if number % 50 == 49 and ringjax.rank() == 0:
            print(
                f"step {number + 1:4}  {ringjax.size()} rank(s)  loss {loss:.4f}  "
                f"accuracy {accuracy:.2%}",
                flush=True,
            )
        time.sleep(arguments.pause)
        state.commit()


keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
params = network.init(keys, images[:1])
state = ringjax.elastic.State(training=step.init(params, load))
train(state)
digest = hashlib.sha256()
for leaf in jax.tree.leaves(state.training):
    digest.update(np.asarray(leaf).tobytes())
if ringjax.rank() == 0:
    print(f"result: SHA-256 {digest.hexdigest()} after {arguments.steps} steps")
