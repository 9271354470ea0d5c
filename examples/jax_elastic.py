"""Elastic training with JAX: it continues when ranks are lost, and new ranks join.

    ringrun -np 4 --min-np 2 python jax_elastic.py
    kill -9 PID                    in another terminal: kills the rank with this PID

The surviving ranks finish the step without the lost rank, distribute its samples among
themselves and continue. ringrun starts a new process, which soon joins the job. Every
sample is in exactly one step of each epoch. The data are the handwritten digits of
`jax_digits.py`. Needs ``pip install "ringjax[examples,checkpoint]"``.

To go further: with ``--checkpoints FOLDER`` a stopped job can continue on any number of
ranks. ``kill PID`` without -9 lets a rank leave after its step. ``ringrun --help``
explains how to change the hosts of a running job. See also `torch_elastic.py`.
"""

from __future__ import annotations

import argparse
import os
import time

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import ringjax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch", type=int, default=16, help="images of each rank")
parser.add_argument("--pause", type=float, default=0.1, help="seconds after a step")
parser.add_argument("--checkpoints", help="a folder that all ranks share")
arguments = parser.parse_args()

ringjax.init()
digits = load_digits()
images = (digits.images[..., None] / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
network = nn.Sequential(
    [nn.Conv(32, (3, 3)), nn.relu, lambda x: x.reshape(len(x), -1), nn.Dense(10)]
)
tx = optax.chain(ringjax.allreduce_grads(), optax.adam(1e-3))


@jax.jit
def step(params, opt_state, x, y):
    def loss_of(params):
        logits = network.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train_on(state, rows):
    new = step(state.params, state.opt_state, images[rows], labels[rows])
    state.params, state.opt_state, loss = new
    return loss


def warm_up(state):
    """Compiles the step in a joining rank, while the members train."""
    train_on(state, np.arange(arguments.batch))


folder = arguments.checkpoints
checkpointer = ringjax.elastic.Checkpointer(folder, every=50) if folder else None


@ringjax.elastic.run(warm_up=warm_up, checkpointer=checkpointer)
def train(state):
    who = f"rank {ringjax.rank()} of {ringjax.size()}, pid {os.getpid()}"
    print(f"{who}: from step {state.step}", flush=True)
    while state.sampler.epoch < arguments.epochs:
        for number, rows in enumerate(state.sampler.batches(arguments.batch)):
            loss = train_on(state, rows)
            state.sampler.record_batch(number, len(rows))
            state.step += 1
            if state.step % 10 == 0 and ringjax.rank() == 0:
                size, done = ringjax.size(), len(state.sampler.processed_indices)
                print(
                    f"step {state.step:4}  {size} rank(s)  epoch "
                    f"{state.sampler.epoch:2}: {done:4} images  loss {loss:.4f}",
                    flush=True,
                )
            time.sleep(arguments.pause)  # leaves time to kill a rank
            state.commit()
        state.sampler.set_epoch(state.sampler.epoch + 1)
        state.commit()
    accuracy = (network.apply(state.params, images).argmax(-1) == labels).mean()
    if ringjax.rank() == 0:
        size = ringjax.size()
        print(f"result: {accuracy:.2%} after {state.step} steps on {size} rank(s)")


params = network.init(jax.random.key(0), images[:1])
train(
    ringjax.elastic.State(
        params=params,
        opt_state=tx.init(params),
        sampler=ringjax.elastic.ElasticSampler(len(labels)),
        step=0,
    )
)
