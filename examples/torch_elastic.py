"""Elastic training with PyTorch: it continues when ranks are lost, and new ranks join.

    ringrun -np 4 --min-np 2 python torch_elastic.py
    kill -9 PID                      in another terminal: kills the rank with this PID

This example works like `jax_elastic.py`, with Horovod's names. A program for Horovod's
elastic mode differs only by its import. Needs
``pip install "ringjax[torch,examples]"``.

To go further: docs/migrate/from-horovod.md lists the differences from Horovod.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import ringjax.torch as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch", type=int, default=16, help="images of each rank")
parser.add_argument("--pause", type=float, default=0.1, help="seconds after a step")
arguments = parser.parse_args()

hvd.init()
torch.set_num_threads(1)  # the ranks of a host share its cores
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
network = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10))
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(network.parameters(), lr=1e-3), network.named_parameters()
)
sampler = hvd.elastic.ElasticSampler(data)
loader = torch.utils.data.DataLoader(data, arguments.batch, sampler=sampler)


@hvd.elastic.run
def train(state):
    who = f"rank {hvd.rank()} of {hvd.size()}, pid {os.getpid()}"
    print(f"{who}: from step {state.step}", flush=True)
    while sampler.epoch < arguments.epochs:
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = functional.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()
            sampler.record_batch(number, len(x))
            state.step += 1
            if state.step % 10 == 0 and hvd.rank() == 0:
                size, done = hvd.size(), len(sampler.processed_indices)
                print(
                    f"step {state.step:4}  {size} rank(s)  epoch {sampler.epoch:2}: "
                    f"{done:4} images  loss {loss.item():.4f}",
                    flush=True,
                )
            time.sleep(arguments.pause)  # leaves time to kill a rank
            state.commit()
        sampler.set_epoch(sampler.epoch + 1)
        state.commit()
    with torch.no_grad():
        right = (network(images).argmax(-1) == data.tensors[1]).float().mean().item()
    if hvd.rank() == 0:
        print(f"result: {right:.2%} after {state.step} steps on {hvd.size()} rank(s)")


train(hvd.elastic.TorchState(network, optimizer, sampler=sampler, step=0))
