"""A PyTorch model with a distributed optimizer, and its copy with a plain optimizer."""

from __future__ import annotations

import copy

import torch

import ringjax.torch as hvd


def build(seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
    )


def batch(rank: int, step: int):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, rank: int, step: int):
    return model(batch(rank, step)).square().mean()


def mean_loss(model, world, step: int):
    return sum(loss_of(model, rank, step) for rank in range(world.size)) / world.size


def close(model, reference) -> None:
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def pair(make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **options):
    """Makes a model with a distributed optimizer, and a copy with a plain optimizer."""
    model = build()
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), **options
    )
    return model, optimizer, reference, make(reference.parameters())
