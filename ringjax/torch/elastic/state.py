"""TorchState: models, optimizers, schedulers and samplers that survive a reset.

What kind of object is saved, restored and sent how is a registry that users may extend.
Everything without a handler is a plain value of `ringjax.elastic.State`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ringjax import elastic
from ringjax.elastic.checkpointer import synced
from ringjax.elastic.handlers import SamplerStateHandler, StateHandler

_FILE = "state.pt"

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "SchedulerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class TorchStateHandler(StateHandler):
    """A module, an optimizer or a scheduler.

    As everywhere in Horovod's elastic training, an object of any type that is in the
    state of one is pickled on its way.
    """

    allow_pickle = True


class ModelStateHandler(TorchStateHandler):
    """A module: its parameters and buffers stay where they are."""


class OptimizerStateHandler(TorchStateHandler):
    """An optimizer, distributed or not."""


class SchedulerStateHandler(TorchStateHandler):
    """A scheduler of the learning rate."""


_handler_registry: list[tuple[type[Any], type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, SchedulerStateHandler),
    (elastic.ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type[Any], type[StateHandler]]]:
    """The pairs of a type and its handler; the first that fits is taken."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type[Any], type[StateHandler]]]) -> None:
    """Replaces the pairs, for states that are made afterwards."""
    global _handler_registry
    _handler_registry = registry


class TorchState(elastic.State):
    """The state of training in PyTorch.

    Args:
        model: a module.
        optimizer: an optimizer.
        **kwargs: further modules, optimizers, schedulers and samplers, and plain
            objects. Each becomes an attribute.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> state = hvd.elastic.TorchState(model=model, batch=0)
        >>> state.sync()
        >>> state.batch = 1
        >>> state.restore()
        >>> state.batch
        0
    """

    _allow_pickle = True

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs, model=model, optimizer=optimizer)

    def _handler_of(self, value: Any) -> StateHandler | None:
        for kind, handler in _handler_registry:
            if isinstance(value, kind):
                return handler(value)
        return None

    def files(self) -> TorchFiles:
        """How a checkpointer writes it."""
        return TorchFiles()


class TorchFiles:
    """A TorchState on disk: one file of `torch.save`, a dict with all attributes.

    As everywhere in PyTorch, plain objects of other kinds are pickled, and reading a
    pickle runs code that its writer chose: load only what you have written.
    """

    def prepared(self, committed: dict[str, Any]) -> dict[str, Any]:
        """What was committed is a copy already."""
        return committed

    def write(self, folder: Path, prepared: dict[str, Any]) -> None:
        """Fills the folder."""
        with synced(folder / _FILE) as file:
            torch.save(prepared, file)

    def read(self, folder: Path, present: dict[str, Any]) -> dict[str, Any]:
        """The attributes that both the file and the program have."""
        found = torch.load(folder / _FILE, map_location="cpu", weights_only=False)
        return {name: value for name, value in found.items() if name in present}
