"""PyTorch training whose result is the same, bit for bit, on any number of ranks.

    ringrun -np 1 python torch_same_bits.py
    ringrun -np 3 python torch_same_bits.py                        the same SHA-256
    ringrun -np 3 --min-np 1 python torch_same_bits.py             elastic: kill ranks

This example works like `same_bits.py`, which is for JAX. Each step has 12 pieces. If a
rank is lost, the other ranks compute its pieces in the same step. Needs
``pip install "ringjax[torch,examples]"``.

To go further: ``--pause 0.1`` leaves time to kill a rank.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import ringjax
import ringjax.torch as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=96, help="images of a step")
parser.add_argument("--pieces", type=int, default=12, help="pieces of a step")
parser.add_argument("--pause", type=float, default=0.0, help="seconds after a step")
arguments = parser.parse_args()

hvd.init()
torch.set_num_threads(1)  # the number of threads is part of the result
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
pieces = ringjax.data.Pieces(len(images), arguments.batch, arguments.pieces)
network = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Flatten()),
    *(nn.Dropout(0.2), nn.Linear(32 * 64, 10)),
)
optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
exact = hvd.ExactGradients(network, arguments.pieces)


def load(step, piece):
    """Returns the data of a piece, which depend on nothing but step and piece."""
    rows = pieces.rows(step, piece)
    return images[rows], labels[rows]


def loss_of(step, piece):
    x, y = load(step, piece)
    torch.manual_seed(step * arguments.pieces + piece)  # for the dropout
    return functional.cross_entropy(network(x), y)


@hvd.elastic.run
def train(state):
    while state.step < arguments.steps:
        losses = {}
        for piece in exact.pieces():
            loss = loss_of(state.step, piece)
            loss.backward()
            losses[piece] = [loss.detach()]
        optimizer.step()
        state.step += 1
        if state.step % 50 == 0:
            like = [torch.zeros(())]
            (loss,) = hvd.exact_allreduce(losses, arguments.pieces, like)
            if hvd.rank() == 0:
                text = f"step {state.step:4}  {hvd.size()} rank(s)  loss {loss:.4f}"
                print(text, flush=True)
        time.sleep(arguments.pause)  # leaves time to kill a rank
        state.commit()


train(hvd.elastic.TorchState(network, optimizer, step=0))
digest = hashlib.sha256()
for tensor in network.state_dict().values():
    digest.update(tensor.numpy().tobytes())
if hvd.rank() == 0:
    print(f"result: SHA-256 {digest.hexdigest()} after {arguments.steps} steps")
