"""TorchState: models, optimizers, schedulers and samplers that survive a reset.

A registry, which programs may extend, has a handler for each type of object, which
saves, restores and sends such objects. Other attributes are plain values of
`ringjax.elastic.State`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import torch

from ringjax import elastic
from ringjax.elastic.array_files import synced
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
    """Base class of handlers that save and restore objects with a `state_dict`.

    As in Horovod's elastic training, objects in a state dict that are not plain data
    are pickled when the state is sent.
    """

    allow_pickle = True


class ModelStateHandler(TorchStateHandler):
    """Saves a module, and restores it in place: its tensors stay the same objects."""


class OptimizerStateHandler(TorchStateHandler):
    """Saves and restores an optimizer, distributed or not."""


class SchedulerStateHandler(TorchStateHandler):
    """Saves and restores a learning-rate scheduler."""


# Pairs of a type and the handler class for objects of this type.
Registry: TypeAlias = list[tuple[type, type[StateHandler]]]

_handler_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, SchedulerStateHandler),
    (elastic.ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Returns the pairs of a type and its handler. The first matching pair is used."""
    return _handler_registry


def set_handler_registry(registry: Registry) -> None:
    """Replaces the pairs of types and handlers, for states that are made afterwards."""
    global _handler_registry
    _handler_registry = registry


class TorchState(elastic.State):
    """The training state of a PyTorch program, restored after a reset.

    Args:
        model: a module.
        optimizer: an optimizer.
        **kwargs: further attributes: modules, optimizers, schedulers, samplers and
            plain objects.

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

    def _handler_of(self, value: object) -> StateHandler | None:
        for kind, handler in _handler_registry:
            if isinstance(value, kind):
                return handler(value)
        return None

    def files(self) -> TorchFiles:
        """Returns the writer and reader of checkpoints."""
        return TorchFiles()


class TorchFiles:
    """Writes and reads a TorchState as one file of `torch.save`: a dict of attributes.

    `torch.save` pickles objects, and loading a pickle runs code that its writer has
    chosen. So load only files that you trust.
    """

    def prepare(self, committed: dict[str, Any]) -> dict[str, Any]:
        """Returns the committed attributes as they are: the commit has copied them."""
        return committed

    def write(self, folder: Path, prepared: dict[str, Any]) -> None:
        """Writes the file of a checkpoint into its folder."""
        with synced(folder / _FILE) as file:
            torch.save(prepared, file)

    def read(self, folder: Path, present: dict[str, Any]) -> dict[str, Any]:
        """Returns the attributes that both the file and the program have."""
        found = torch.load(folder / _FILE, map_location="cpu", weights_only=False)
        return {name: value for name, value in found.items() if name in present}
