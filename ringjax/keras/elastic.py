"""Elastic training with `model.fit`: KerasState, and callbacks that update a state.

The module path is Horovod's; `ringjax.elastic` runs the training function.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ringjax.elastic import ElasticSampler, State, run, run_fn
from ringjax.elastic.handlers import SamplerStateHandler, StateHandler
from ringjax.keras.keras_types import Logs, Model, Optimizer, Variable

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
    "run_fn",
]


class VariablesHandler(StateHandler):
    """Saves and restores an object with variables of Keras, by copies of the values."""

    def variables(self) -> list[Variable]:
        """Returns all variables, in the same order on all ranks."""
        return list(self.value.variables)

    def state(self) -> list[np.ndarray[Any, Any]]:
        """Returns the values of the variables, which the caller copies."""
        return [keras.ops.convert_to_numpy(variable) for variable in self.variables()]

    def load(self, state: list[np.ndarray[Any, Any]]) -> None:
        """Sets the variables."""
        for variable, value in zip(self.variables(), state, strict=True):
            variable.assign(value)


class ModelHandler(VariablesHandler):
    """Saves and restores the weights of a model."""

    def variables(self) -> list[Variable]:
        """Returns all weights, including those that are not trainable."""
        _sync_variables(self.value)
        return list(self.value.weights)


class OptimizerHandler(VariablesHandler):
    """Saves and restores an optimizer, distributed or not, of a given model."""

    def __init__(self, value: Optimizer, model: Model) -> None:
        self._model = model
        super().__init__(value)

    def variables(self) -> list[Variable]:
        """Returns the optimizer's variables; builds the optimizer first if needed."""
        if not self.value.built and self._model.built:
            self.value.build(self._model.trainable_variables)
        _sync_variables(self._model)
        return list(self.value.variables)


class KerasState(State):
    """The training state of a Keras model, restored after a reset.

    Args:
        model: a built model, with an `Input` or after `build`. A new rank then has all
            variables whose values it receives from other ranks.
        optimizer: the optimizer. If it is None, the optimizer of the compiled model is
            used.
        **kwargs: further attributes, as for `ringjax.elastic.State`. Callbacks of
            `ringjax.keras.elastic` update `batch` and `epoch`.

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

    def __init__(
        self, model: Model, optimizer: Optimizer = None, **kwargs: Any
    ) -> None:
        if not getattr(model, "built", True):
            raise ValueError(
                "Model must be built first. Run `model.build(input_shape)`."
            )
        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        self._optimized = model
        super().__init__(**kwargs, model=model, optimizer=optimizer)

    def _handler_of(self, value: object) -> StateHandler | None:
        if isinstance(value, keras.Model):
            return ModelHandler(value)
        if isinstance(value, keras.optimizers.Optimizer):
            return OptimizerHandler(value, self._optimized)
        if isinstance(value, ElasticSampler):
            return SamplerStateHandler(value)
        return None


def _sync_variables(model: Model) -> None:
    # During `fit` on JAX, the current values are in the state of the train step. The
    # variables of the model have old values until Keras copies the current values back.
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state after every `batches_per_commit` batches and after every epoch.

    Put it behind the callbacks that update `state.batch` and `state.epoch`.

    Args:
        state: a `KerasState`.
        batches_per_commit: the number of batches that a failure loses at most.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        """Counts batches from 0, so that all ranks commit after the same batches."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Commits after every `batches_per_commit` batches."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Commits after every epoch."""
        self.commit()

    def commit(self) -> None:
        """Commits the state; a subclass may add further work."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Sets `state.batch` to the batch within the epoch, and to 0 between epochs.

    If training restarts in the middle of an epoch, this callback reduces the number of
    steps that other callbacks see (`params["steps"]`). `fit` of Keras 3 does not read
    that number, so pass `fit` only the remaining batches, or
    ``steps_per_epoch=steps - state.batch``.

    Args:
        state: a state with an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Discards the number of steps, which depends on the number of ranks."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Sets the number of steps that this epoch still has."""
        if self.params and self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Sets `state.batch` to the index of the batch that has ended."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Sets `state.batch` to 0 for the next epoch."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Sets `state.epoch` to the number of finished epochs, restarts included.

    Args:
        state: a state with an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        """Stores the number of finished epochs, because `fit` counts from 0 again."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Sets `state.epoch` to the number of finished epochs."""
        self.state.epoch = self.initial_epoch + epoch + 1
