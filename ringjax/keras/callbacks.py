"""Horovod's callbacks for `model.fit`: broadcast, averages of metrics, learning rates.

Those of elastic training are in elastic.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from ringjax import eager, runtime
from ringjax.keras.backends import backend
from ringjax.ops import Average


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks the root's variables of model and optimizer, once.

    Before the first batch, if the model has been built by then, else after it.

    Args:
        root_rank: the rank that has the variables.
        device: accepted and ignored.
        local_variables: variables of the model that each rank keeps, or one.

    Raises:
        ValueError: `local_variables` has something that is no variable.

    Example:
        >>> import ringjax.keras as hvd
        >>> callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Any = None,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local = set[int]()
        kept = [] if local_variables is None else local_variables
        for variable in [kept] if _is_variable(kept) else kept:
            if not _is_variable(variable):
                raise ValueError("All local variables must be of type keras.Variable.")
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable as each rank has it."""
        self._local.add(id(var))
        self._local.add(id(getattr(var, "value", var)))

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcasts if the model has its variables."""
        if not self.broadcast_done:
            model, optimizer = self.model, self.model.optimizer
            if not model.built:
                return
            if optimizer is not None and not optimizer.built:
                optimizer.build(model.trainable_variables)
            self._broadcast()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts if that was not done before."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        model = self.model
        mine = [v for v in model.weights if not self._is_local(v)]
        optimizer = [] if model.optimizer is None else list(model.optimizer.variables)
        backend().broadcast_variables([*mine, *optimizer], self.root_rank)
        self.broadcast_done = True

    def _is_local(self, variable: Any) -> bool:
        if id(variable) in self._local:
            return True
        # On JAX the value is another array after every step.
        return backend().name != "jax" and id(variable.value) in self._local


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over all ranks.

    Put it before callbacks that use metrics: EarlyStopping, ReduceLROnPlateau,
    TensorBoard, ModelCheckpoint.

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

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces all values in `logs`; they have the same names on all ranks."""
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

    Where the learning rate changes, what an optimizer with momentum remembers is scaled
    with it (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1): what
    SGD and RMSprop keep contains the learning rate with which it came about.

    Args:
        initial_lr: what the multiplier multiplies.
        multiplier: a function of the epoch, which is a fraction unless `staircase`; or
            a number, which is raised to the power of the epochs since `start_epoch`.
        start_epoch: the first epoch with this schedule.
        end_epoch: the first one without it; None: it stays to the end.
        staircase: change it at the begin of epochs only, not at every batch.
        momentum_correction: whether momentum is scaled.
        steps_per_epoch: batches of an epoch; None: as `fit` says it.

    Raises:
        ValueError: `initial_lr` is None.

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

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds out how many batches an epoch has, if that matters."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self._autodetect_steps_per_epoch()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remembers the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate, if it is time."""
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

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the learning rate under `lr`."""
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

    Batch by batch, linearly, as in Goyal et al. (see the base class).

    Args:
        initial_lr: the learning rate after the warm-up, for all ranks together.
        warmup_epochs: how long it takes.
        momentum_correction: as for the base class, as is `steps_per_epoch`.
        steps_per_epoch: see there.
        verbose: 1: rank 0 says when it is over.

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
            # So that an epoch ends with a round number.
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

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """As the base class; says when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose > 0 and runtime.rank() == 0:
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to "
                f"{_learning_rate(self.model.optimizer):g}."
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """A ModelCheckpoint of the best model so far, whose `filepath` is set later.

    Args:
        monitor: the metric that says what is best; see Keras' ModelCheckpoint for this
            and the others.
        verbose: see there.
        save_weights_only: see there.
        mode: see there.
        save_freq: see there.

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
            # A name that Keras accepts, until the program gives one.
            filepath="best.weights.h5" if save_weights_only else "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint: set its attribute `filepath` before training"
            )
        super()._save_model(*args, **kwargs)


def _is_variable(value: Any) -> bool:
    """Whether it is one of Keras, or what such a one holds."""
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _learning_rate(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _scale_momentum(optimizer: Any, factor: float) -> None:
    """Multiplies what an optimizer with momentum keeps of earlier steps."""
    plain = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(plain, "momentum", 0.0):
        return
    for name in ("momentums", "_momentums"):  # SGD, RMSprop
        for variable in getattr(plain, name, None) or ():
            if variable is not None:
                variable.assign(variable * keras.ops.cast(factor, variable.dtype))
