"""Callbacks of `model.fit` that commit an elastic state and update its counters."""

from __future__ import annotations

from typing import Any

import keras

from ringjax import elastic
from ringjax.keras.keras_types import Logs


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state after every `batches_per_commit` batches and after every epoch.

    Put it behind the callbacks that update `state.batch` and `state.epoch`.

    Args:
        state: a `KerasState`.
        batches_per_commit: the number of batches that a failure loses at most.
    """

    def __init__(self, state: elastic.State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        """Restarts the count, so that all ranks commit after the same batches."""
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
        """Commits the state; a subclass may do more."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Sets `state.batch` to the batch within the epoch, and to 0 between epochs.

    If training restarts in the middle of an epoch, this callback reduces the number of
    steps that other callbacks see (`params["steps"]`). Keras 3 itself runs to the end
    of the data, so give `fit` the rest or ``steps_per_epoch=steps - state.batch``.

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
        """Stores the number of the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Resets the number of the batch for the next epoch."""
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
        """Stores the finished epochs, because `fit` counts from 0 again."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Counts this epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1
