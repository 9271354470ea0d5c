"""Handlers save, restore and send attributes that have a `state_dict`.

This module has the handler of samplers. The handlers of PyTorch's modules and
optimizers are in `ringjax.torch.elastic.state`.
"""

from __future__ import annotations

import copy
from typing import Any

from ringjax.elastic import transfer
from ringjax.elastic.sampler import ElasticSampler


class StateHandler:
    """Saves, restores and sends one object.

    Args:
        value: an object with `state_dict` and `load_state_dict`. Only subclasses that
            override `state` and `load` accept other objects.
    """

    allow_pickle = False

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def state(self) -> Any:
        """Returns the current state of the object."""
        return self.value.state_dict()

    def load(self, state: Any) -> None:
        """Loads a state into the object. The caller must not use `state` afterwards."""
        self.value.load_state_dict(state)

    def save(self) -> None:
        """Keeps a copy of the object's state in memory."""
        self._saved = copy.deepcopy(self.state())

    def restore(self) -> None:
        """Loads the state that the last `save` has copied."""
        # Load a copy, because an optimizer changes the tensors that it has loaded.
        self.load(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Loads the state of rank 0's object."""
        state = {"it": self.state()}
        sent = transfer.broadcast_state(state, allow_pickle=self.allow_pickle)
        if sent is not None:
            self.load(sent["it"])

    def set_value(self, value: Any) -> None:
        """Replaces the object, and saves the state of the new object."""
        self.value = value
        self.save()

    def saved(self) -> Any:
        """Returns the state that the last `save` has copied. Do not change it."""
        return self._saved


class SamplerStateHandler(StateHandler):
    """Handles an ElasticSampler. `load` distributes the remaining samples again."""

    value: ElasticSampler


def handler_of(value: object) -> StateHandler | None:
    """Returns a handler for an attribute of a `State`, or None for plain values."""
    if isinstance(value, ElasticSampler):
        return SamplerStateHandler(value)
    if isinstance(value, type):
        return None
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return StateHandler(value) if all(map(callable, methods)) else None
