"""Elastic training with `model.fit`: KerasState, and callbacks that keep it current.

Horovod's module path; the loop is `ringjax.elastic`.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ringjax import elastic
from ringjax.elastic import run, run_fn
from ringjax.elastic.handlers import SamplerStateHandler, StateHandler

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
    "run_fn",
]


class VariablesHandler(StateHandler):
    """Something with variables of Keras, as arrays in the memory of this host."""

    def variables(self) -> list[Any]:
        """All of them, in the same order on all ranks."""
        return list(self.value.variables)

    def state(self) -> list[np.ndarray[Any, Any]]:
        """What they are now; to be copied before they change."""
        return [keras.ops.convert_to_numpy(one) for one in self.variables()]

    def load(self, state: list[np.ndarray[Any, Any]]) -> None:
        """Sets them."""
        for variable, value in zip(self.variables(), state, strict=True):
            variable.assign(value)


class ModelHandler(VariablesHandler):
    """A model: its weights. Within `fit` on JAX they are not where Keras shows them."""

    def variables(self) -> list[Any]:
        """The weights, trained and not."""
        _bring_back(self.value)
        return list(self.value.weights)


class OptimizerHandler(VariablesHandler):
    """An optimizer, distributed or not.

    Args:
        value: the optimizer.
        model: whose variables it changes.
    """

    def __init__(self, value: Any, model: Any) -> None:
        self._model = model
        super().__init__(value)

    def variables(self) -> list[Any]:
        """Those that it has for its model, and its own."""
        if not self.value.built and self._model.built:
            self.value.build(self._model.trainable_variables)
        _bring_back(self._model)
        return list(self.value.variables)


class KerasState(elastic.State):
    """The state of training a Keras model.

    Args:
        model: a model that is built (give it an Input, or call `build`), so that a rank
            that joins has the variables to receive.
        optimizer: its optimizer; None: the one that it was compiled with.
        **kwargs: further attributes, as for `ringjax.elastic.State`; `batch` and
            `epoch` are what the callbacks here keep current.

    Raises:
        ValueError: the model is not built.

    Example:
        >>> import keras, ringjax.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
        >>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
        >>> state.sync()
        >>> state.batch = 3
        >>> state.restore()
        >>> state.batch
        0
    """

    _allow_pickle = True

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError(
                "Model must be built first. Run `model.build(input_shape)`."
            )
        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        self._optimized = model
        super().__init__(**kwargs, model=model, optimizer=optimizer)

    def _handler_of(self, value: Any) -> StateHandler | None:
        if isinstance(value, keras.Model):
            return ModelHandler(value)
        if isinstance(value, keras.optimizers.Optimizer):
            return OptimizerHandler(value, self._optimized)
        if isinstance(value, elastic.ElasticSampler):
            return SamplerStateHandler(value)
        return None


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state after every `batches_per_commit` batches, and after every epoch.

    Put it after the callbacks that keep `state.batch` and `state.epoch` current.

    Args:
        state: a `KerasState`.
        batches_per_commit: how many batches are lost at most.
    """

    def __init__(self, state: elastic.State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to count anew, on all ranks."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits, if it is time."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits."""
        self.commit()

    def commit(self) -> None:
        """Commits the state; a subclass may do more."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps `state.batch` at the batch of the epoch; 0 between epochs.

    When training starts again in the middle of an epoch, callbacks are told that the
    first epoch has fewer steps (`params["steps"]`). Keras 3 itself goes to the end of
    the data: give `fit` what is left, or ``steps_per_epoch=steps - state.batch``.

    Args:
        state: a state with an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets what the epoch was like with other ranks."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Finds out what is left of this epoch."""
        if self.params and self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch starts at 0."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps `state.epoch` at the number of finished epochs, over all restarts.

    Args:
        state: a state with an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """`fit` counts from 0 again."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts this epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1


def _bring_back(model: Any) -> None:
    """Within `fit` on JAX, the variables get the values that the train step holds."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
