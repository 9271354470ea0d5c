"""LightningModules and data for the tests of `ringjax.lightning`.

The data are float64, so that a different order of additions does not matter. `share`
gives rank r the samples r, r + size, ... in order: Lightning's own sampler shuffles. So
step k of all ranks together has the samples of step k of one process with `size` times
the batch.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ringjax.torch as hvd
from ringjax.lightning import RingjaxStrategy

FEATURES = 6
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def dataset(rows: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, FEATURES, generator=random, dtype=torch.float64)
    y = x.square().sum(1, keepdim=True) - x[:, :1]
    return TensorDataset(x.to(dtype), y.to(dtype))


def loader(rows: int, batch: int, dtype: torch.dtype = torch.float64) -> Any:
    return DataLoader(dataset(rows, dtype), batch_size=batch)


def share(rows: int, batch: int, dtype: torch.dtype = torch.float64) -> Any:
    """Returns a loader of this rank's samples, in order."""
    data = dataset(rows, dtype)
    sampler = DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=False)
    return DataLoader(data, batch_size=batch, sampler=sampler)


class Regression(lightning.LightningModule):
    """A small network, its Adam and a schedule; `optimizer` makes another one."""

    def __init__(self, seed: int = 3, optimizer: Any = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Linear(FEATURES, 8).double()
        self.head = torch.nn.Linear(8, 1).double()
        self.unused = torch.nn.Linear(2, 2).double()
        self.make = optimizer or (lambda p: torch.optim.Adam(p, lr=0.02))
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))

    def loss(self, batch: Any) -> torch.Tensor:
        return functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Adversarial(lightning.LightningModule):
    """Two networks with an optimizer each, which train in turns by hand.

    Args:
        toggle: whether an optimizer's step turns the other network's gradients off.
        every: the number of batches in which the generator's gradients add up.
    """

    def __init__(self, toggle: bool = True, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(5)
        self.generator = torch.nn.Linear(FEATURES, FEATURES).double()
        self.critic = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        ).double()
        self.toggle, self.every = toggle, every

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        x = batch[0]
        if self.toggle:
            self.toggle_optimizer(first)
        judged = self.critic(self.generator(x))
        self.manual_backward(functional.softplus(-judged).mean() / self.every)
        if (index + 1) % self.every == 0:
            self.clip_gradients(first, 0.05, gradient_clip_algorithm="norm")
            first.step()
            first.zero_grad()
        if self.toggle:
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
        second.zero_grad()
        fake = self.critic(self.generator(x).detach())
        loss = (
            functional.softplus(fake).mean()
            + functional.softplus(-self.critic(x)).mean()
        )
        self.manual_backward(loss)
        second.step()
        if self.toggle:
            self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.02),
            torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.9),
        )


def ringjax_trainer(folder: Path, *, options: Any = None, **arguments: Any) -> Any:
    strategy = RingjaxStrategy(**(options or {}))
    return _trainer(folder, strategy=strategy, **arguments)


def alone_trainer(folder: Path, **arguments: Any) -> Any:
    """Returns the reference: a trainer of one process, as Lightning comes."""
    return _trainer(folder, devices=1, **arguments)


def _trainer(folder: Path, **arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning.Trainer(**{**QUIET, "default_root_dir": folder, **arguments})


def assert_equal(
    module: torch.nn.Module, reference: torch.nn.Module, atol: float = 1e-8
) -> None:
    pairs = zip(module.named_parameters(), reference.parameters(), strict=True)
    for (name, p), other in pairs:
        difference = (p.detach() - other.detach()).abs().max()
        assert difference <= atol, f"{name} differs by {difference}"
