"""TorchState: models, optimizers, schedulers and samplers that survive a reset.

What kind of object is saved, restored and sent how is a registry that users may extend.
Everything without a handler is a plain object of `ObjectState`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ringjax import runtime
from ringjax.elastic import ObjectState
from ringjax.torch.elastic.sampler import ElasticSampler
from ringjax.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class StateHandler:
    """How one kind of object is saved, restored and sent.

    Args:
        value: an object with `state_dict` and `load_state_dict`, unless the subclass
            brings methods of its own.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keeps a copy of the object's state in memory."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Brings back what `save` kept last."""
        # A copy: an optimizer goes on with the very tensors that it is given.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Loads the state of rank 0's object."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def set_value(self, value: Any) -> None:
        """Goes on with another object, as it is now."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """A module: its parameters and buffers are sent one by one, in place."""

    def sync(self) -> None:
        """Takes over rank 0's parameters and buffers."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """An optimizer, distributed or not."""

    def sync(self) -> None:
        """Takes over rank 0's state and options."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SchedulerStateHandler(StateHandler):
    """A scheduler of the learning rate."""


class SamplerStateHandler(StateHandler):
    """An ElasticSampler: loading its state cuts what remains anew."""


_handler_registry: list[tuple[type[Any], type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, SchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type[Any], type[StateHandler]]]:
    """The pairs of a type and its handler; the first that fits is taken."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type[Any], type[StateHandler]]]) -> None:
    """Replaces the pairs, for states that are made afterwards."""
    global _handler_registry
    _handler_registry = registry


class TorchState(ObjectState):
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

    _handlers: dict[str, StateHandler]

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        self._handlers = {}
        plain = {}
        for name, value in {**kwargs, "model": model, "optimizer": optimizer}.items():
            handler = _handler_of(value)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
                super().__setattr__(name, value)
        super().__init__(broadcast_object, runtime.rank, **plain)

    def save(self) -> None:
        """Copies everything to this process's memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Brings everything back to the last commit."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Gives all ranks what rank 0 has, and saves it."""
        for handler in self._handlers.values():
            handler.sync()
            # Rank 0 may be lost before the next commit; then another one's counts.
            handler.save()
        super().sync()

    def reset(self) -> None:
        """Cuts samplers anew: no `sync` follows if ranks have only left."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_handlers" and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


def _handler_of(value: Any) -> StateHandler | None:
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            return handler(value)
    return None
