"""How objects with a state of their own are saved, restored and sent.

Samplers here; PyTorch's modules and optimizers bring handlers of their own.
"""

from __future__ import annotations

import copy
from typing import Any

from ringjax.elastic import transfer
from ringjax.elastic.sampler import ElasticSampler


class StateHandler:
    """How one kind of object is saved, restored and sent.

    Args:
        value: an object with `state_dict` and `load_state_dict`, unless the subclass
            brings methods of its own.
    """

    allow_pickle = False

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def state(self) -> Any:
        """What the object is now."""
        return self.value.state_dict()

    def load(self, state: Any) -> None:
        """Makes the object what `state` says, which belongs to it from now on."""
        self.value.load_state_dict(state)

    def save(self) -> None:
        """Keeps a copy of the object's state in memory."""
        self._saved = copy.deepcopy(self.state())

    def restore(self) -> None:
        """Brings back what `save` kept last."""
        # A copy: an optimizer goes on with the very tensors that it is given.
        self.load(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Loads the state of rank 0's object."""
        sent = transfer.broadcast_state(
            {"it": self.state()}, allow_pickle=self.allow_pickle
        )
        if sent is not None:
            self.load(sent["it"])

    def set_value(self, value: Any) -> None:
        """Goes on with another object, as it is now."""
        self.value = value
        self.save()

    def saved(self) -> Any:
        """What `save` kept last, to be read only."""
        return self._saved


class SamplerStateHandler(StateHandler):
    """An ElasticSampler: loading its state cuts what remains anew."""

    value: ElasticSampler


def handler_of(value: Any) -> StateHandler | None:
    """The handler of an attribute of a `State`; None for plain values."""
    if isinstance(value, ElasticSampler):
        return SamplerStateHandler(value)
    if isinstance(value, type):
        return None
    known = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return StateHandler(value) if all(map(callable, known)) else None
