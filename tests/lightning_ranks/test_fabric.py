"""Loops that are written with Fabric train on several ranks like one process."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from support.lightning_modules import FEATURES, assert_equal, loader, share
from torch.nn import functional

import ringjax.torch as hvd
from ringjax.lightning import RingjaxFabricStrategy

pytestmark = [
    pytest.mark.launch("lightning"),
    pytest.mark.timeout(240),
    # Lightning advises on workers of data loaders and the like.
    pytest.mark.filterwarnings("ignore"),
]
SEVERAL = pytest.mark.ranks(2, 3)


def _networks() -> list[torch.nn.Module]:
    torch.manual_seed(4)
    return [torch.nn.Linear(FEATURES, 3).double(), torch.nn.Linear(3, 1).double()]


def _train(fabric: Any, batches: Any, window: int) -> list[torch.nn.Module]:
    """Trains two networks with an optimizer each for 5 epochs."""
    pairs = []
    for network in _networks():
        optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
        pairs.append(fabric.setup(network, optimizer))
    (first, one), (second, two) = pairs
    for _ in range(5):
        for index, (x, y) in enumerate(batches):
            accumulates = (index + 1) % window != 0
            with fabric.no_backward_sync(first, enabled=accumulates):
                loss = functional.mse_loss(second(torch.tanh(first(x))), y)
                fabric.backward(loss / window)
            if not accumulates:
                fabric.clip_gradients(first, one, max_norm=0.1)
                for optimizer in (one, two):
                    optimizer.step()
                    optimizer.zero_grad()
    return [first, second]


@SEVERAL
@pytest.mark.parametrize("window", [1, 3])
def test_a_loop_of_two_networks_equals_one_process(world, window) -> None:
    fabric = lightning.Fabric(strategy="ringjax", accelerator="cpu")
    fabric.launch()
    assert (fabric.world_size, fabric.global_rank) == (world.size, world.rank)
    rows = 4 * world.size * 12
    found = _train(fabric, share(rows, 4), window)
    alone = lightning.Fabric(accelerator="cpu", devices=1)
    expected = _train(alone, loader(rows, 4 * world.size), window)
    for network, other in zip(found, expected, strict=True):
        assert_equal(network, other)


@SEVERAL
def test_collectives_and_loaders_of_fabric(world, tmp_path) -> None:
    fabric = lightning.Fabric(strategy=RingjaxFabricStrategy(), accelerator="cpu")
    fabric.launch()
    total = fabric.all_reduce(torch.tensor(world.rank + 1.0), reduce_op="sum")
    assert float(total) == sum(range(1, world.size + 1))
    gathered = fabric.all_gather(torch.tensor([world.rank]))
    assert gathered.tolist() == [[rank] for rank in range(world.size)]
    assert fabric.broadcast("of rank 1" if world.rank == 1 else "", src=1)
    rows = 4 * world.size * 2
    batches = fabric.setup_dataloaders(loader(rows, 4))
    assert sum(len(y) for _, y in batches) == rows // world.size
    network, optimizer = fabric.setup(
        _networks()[0], torch.optim.SGD(_networks()[0].parameters(), lr=0.1)
    )
    path = hvd.broadcast_object(str(tmp_path)) + "/state.ckpt"
    fabric.save(path, {"network": network, "optimizer": optimizer, "step": 3})
    fabric.barrier()
    state = {"network": network, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    assert state["step"] == 3
    with pytest.raises(ValueError, match="devices=9"):
        lightning.Fabric(strategy="ringjax", accelerator="cpu", devices=9)
