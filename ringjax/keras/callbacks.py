"""Horovod's callbacks for `model.fit`: broadcast, metrics, learning rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import keras
import numpy as np

from ringjax import eager, runtime
from ringjax.keras.backends import backend
from ringjax.keras.keras_types import Logs, Optimizer, Variable
from ringjax.ops import Average


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the root's variables of model and optimizer, once.

    The callback broadcasts before the first batch, or after the first batch if the
    model is not built before.

    Args:
        root_rank: the rank that has the variables.
        device: accepted and ignored.
        local_variables: one or more variables of the model that are not broadcast.

    Raises:
        ValueError: `local_variables` contains an object that is no variable.

    Example:
        >>> import ringjax.keras as hvd
        >>> callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Variable | Iterable[Variable] = None,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local = set[int]()
        local = [] if local_variables is None else local_variables
        for variable in [local] if _is_variable(local) else local:
            if not _is_variable(variable):
                raise ValueError("All local variables must be of type keras.Variable.")
            self.register_local_var(variable)

    def register_local_var(self, var: Variable) -> None:
        """Excludes a variable from the broadcast."""
        self._local.add(id(var))
        self._local.add(id(getattr(var, "value", var)))

    def on_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Broadcasts before the first batch if the model is built."""
        if not self.broadcast_done:
            model, optimizer = self.model, self.model.optimizer
            if not model.built:
                return
            if optimizer is not None and not optimizer.built:
                optimizer.build(model.trainable_variables)
            self._broadcast()

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcasts after the first batch if the model was not built before it."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        model = self.model
        variables = [v for v in model.weights if not self._is_local(v)]
        if model.optimizer is not None:
            variables += model.optimizer.variables
        backend().broadcast_variables(variables, self.root_rank)
        self.broadcast_done = True

    def _is_local(self, variable: Variable) -> bool:
        if id(variable) in self._local:
            return True
        # On JAX the value of a variable is a new array after every step, so the id of
        # the registered array may belong to another object now.
        return backend().name != "jax" and id(variable.value) in self._local


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over all ranks.

    Put this callback before callbacks that use metrics, such as EarlyStopping,
    ReduceLROnPlateau, TensorBoard and ModelCheckpoint.

    Args:
        device: accepted and ignored.

    Example:
        >>> import ringjax.keras as hvd
        >>> hvd.init()
        >>> logs = {"loss": 0.5}
        >>> hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
        >>> logs
        {'loss': 0.5}
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Averages the metrics in `logs`, which must have equal names on all ranks."""
        logs = {} if logs is None else logs
        handles = {
            name: eager.allreduce_async(
                np.asarray(value, np.float64),
                Average,
                name=f"MetricAverageCallback.{name}",
            )
            for name, value in sorted(logs.items())
        }
        for name, handle in handles.items():
            average = eager.synchronize(handle)
            logs[name] = average.item() if average.ndim == 0 else average


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` times a multiplier.

    If the learning rate changes, the momentum of the optimizer is scaled by the same
    factor, because the momentum of SGD and RMSprop contains the learning rate of the
    steps that formed it.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch, or a number. A number is raised to the
            power of the epochs since `start_epoch`. Without `staircase` the epoch has a
            fraction.
        start_epoch: the first epoch of the schedule.
        end_epoch: the first epoch after the schedule. If it is None, the schedule has
            no end.
        staircase: whether the learning rate changes only at the beginning of epochs,
            and not at every batch.
        momentum_correction: whether the momentum is scaled.
        steps_per_epoch: the number of batches of an epoch. If it is None, the number
            that `fit` passes to callbacks is used.

    Raises:
        ValueError: `initial_lr` is None.

    References:
        P. Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.1.

    Example:
        >>> import ringjax.keras as hvd
        >>> callback = hvd.callbacks.LearningRateScheduleCallback(
        ...     initial_lr=0.1, multiplier=lambda epoch: 0.1 ** (epoch // 30)
        ... )
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = multiplier
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Determines the number of batches of an epoch if the schedule needs it."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self._autodetect_steps_per_epoch()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Stores the index of the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Sets the learning rate in the epochs of the schedule."""
        epoch = self.current_epoch
        if epoch < self.start_epoch:
            return
        if self.end_epoch is not None and epoch >= self.end_epoch:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust_learning_rate(epoch + float(batch) / self.steps_per_epoch)
        elif batch == 0:
            self._adjust_learning_rate(epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Stores the learning rate in `logs`, under `lr`."""
        if logs is not None:
            logs["lr"] = _learning_rate(self.model.optimizer)

    def _autodetect_steps_per_epoch(self) -> int:
        steps: int | None = (self.params or {}).get("steps")
        if not steps:
            raise ValueError(
                "Could not autodetect the number of steps per epoch. Please specify "
                f"the steps_per_epoch parameter to the {type(self).__name__}()."
            )
        return steps

    def _adjust_learning_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = _learning_rate(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        if self.momentum_correction and old not in (0.0, new):
            _scale_momentum(optimizer, new / old)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size()`` to `initial_lr`.

    The learning rate grows linearly, at every batch, as in Goyal et al. (see the base
    class).

    Args:
        initial_lr: the learning rate after the warm-up, for all ranks together.
        warmup_epochs: the number of epochs of the warm-up.
        momentum_correction: as for the base class.
        steps_per_epoch: as for the base class.
        verbose: if it is 1, rank 0 prints a line at the end of the warm-up.

    Example:
        >>> import ringjax.keras as hvd
        >>> hvd.init()
        >>> callback = hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size())
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            # Count the current batch as done, so that the last batch completes the
            # warm-up.
            done = (epoch + 1.0 / self.steps_per_epoch) / warmup_epochs
            size = runtime.size()
            return (1.0 + done * (size - 1)) / size

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Stores the learning rate; prints a line at the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose > 0 and runtime.rank() == 0:
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to "
                f"{_learning_rate(self.model.optimizer):g}."
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """A ModelCheckpoint that saves the best model, and whose `filepath` is set later.

    The arguments are the same as for `keras.callbacks.ModelCheckpoint`.

    Args:
        monitor: the metric that decides which model is the best.
        verbose: if it is 1, the callback prints a line for each saved model.
        save_weights_only: whether only the weights are saved.
        mode: "min", "max" or "auto": whether a small or a large metric is better.
        save_freq: "epoch", or a number of batches.

    Example:
        >>> import ringjax.keras as hvd
        >>> callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        >>> callback.filepath = "best.keras"
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            # Keras' constructor requires a file name. The program sets its own file
            # name later.
            filepath="best.weights.h5" if save_weights_only else "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: str | Path | None = None

    def _save_model(self, *args: object, **kwargs: object) -> None:
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint: set its attribute `filepath` before training"
            )
        super()._save_model(*args, **kwargs)


def _is_variable(value: object) -> bool:
    """Returns whether `value` is a variable of Keras or the value of a variable."""
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _learning_rate(optimizer: Optimizer) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _scale_momentum(optimizer: Optimizer, factor: float) -> None:
    """Multiplies the momentum of SGD and RMSprop; other optimizers do not change."""
    plain = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(plain, "momentum", 0.0):
        return
    for name in ("momentums", "_momentums"):  # the attributes of SGD and of RMSprop
        for variable in getattr(plain, name, None) or ():
            if variable is not None:
                variable.assign(variable * keras.ops.cast(factor, variable.dtype))
