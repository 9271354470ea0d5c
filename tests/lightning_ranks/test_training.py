"""Trainer on 2 and 3 ranks trains like one process with the global batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_modules import (
    Adversarial,
    Regression,
    alone_trainer,
    assert_equal,
    loader,
    ringjax_trainer,
    share,
)

pytestmark = [
    pytest.mark.launch("lightning"),
    pytest.mark.timeout(240),
    # Lightning advises on workers of data loaders and the like.
    pytest.mark.filterwarnings("ignore"),
]
SEVERAL = pytest.mark.ranks(2, 3)
STEPS = 50


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(
        parameters, lr=0.1, max_iter=4, line_search_fn="strong_wolfe"
    )


def _trained(
    world: Any,
    folder: Path,
    make: Callable[[], Any],
    options: Any = None,
    **arguments: Any,
) -> tuple[Any, Any]:
    """Trains a module on all ranks and one on this process; returns both trainers."""
    arguments = {"max_steps": STEPS, "max_epochs": -1, **arguments}
    module, alone = make(), make()
    trainer = ringjax_trainer(folder, options=options, **arguments)
    rows = 4 * world.size * 10  # 10 batches of an epoch
    trainer.fit(module, share(rows, 4))
    reference = alone_trainer(folder, **arguments)
    reference.fit(alone, loader(rows, 4 * world.size))
    assert trainer.global_step == reference.global_step > 0
    assert_equal(module, alone)
    return trainer, reference


@SEVERAL
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 4},  # the last window of an epoch has 2 batches
    ],
    ids=["plain", "norm", "value", "windows"],
)
def test_adam_trains_like_one_process(world, tmp_path, arguments) -> None:
    trainer, reference = _trained(world, tmp_path, Regression, **arguments)
    for name in ("train",):
        torch.testing.assert_close(
            trainer.callback_metrics[name], reference.callback_metrics[name]
        )


@SEVERAL
@pytest.mark.parametrize("optimizer", [_sgd, _lbfgs])
def test_other_optimizers_train_like_one_process(world, tmp_path, optimizer) -> None:
    # LBFGS is chaotic here: rounding errors have grown to 1e-11 after 10 steps.
    steps = 10 if optimizer is _lbfgs else STEPS
    make = partial(Regression, optimizer=optimizer)
    _trained(world, tmp_path, make, max_steps=steps)


@SEVERAL
@pytest.mark.parametrize("toggle", [True, False])
def test_two_optimizers_train_like_one_process(world, tmp_path, toggle) -> None:
    for every in (1, 2):
        _trained(world, tmp_path, partial(Adversarial, toggle, every))
