"""Trains a Keras model in the ranks of an estimator, and predicts in Spark tasks.

Keras is imported inside of the functions, because its backend must be chosen before the
import.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import cloudpickle
import numpy as np

from ringjax import runtime
from ringjax.spark.common.parquet_rows import Array, Batch
from ringjax.spark.common.training_loop import TrainingJob, ringjax_initialized

Keras: TypeAlias = Any
"""The module `keras`, which has no types and is not imported here."""

Model: TypeAlias = Any
"""A `keras.Model`."""

Arrays: TypeAlias = Array | tuple[Array, ...]
FitBatch: TypeAlias = tuple[Arrays, Arrays, Arrays]
"""The inputs, labels and weights of a batch."""

Spec: TypeAlias = dict[str, Any]
"""The model, optimizer, losses and other Params of a `KerasEstimator`."""


def unpickle_model(data: bytes, custom_objects: bytes) -> Model:
    """Loads a pickled model that may use the program's own classes."""
    import keras

    with keras.saving.custom_object_scope(cloudpickle.loads(custom_objects)):
        return cloudpickle.loads(data)


def train(
    custom_objects: bytes, job: TrainingJob, data: bytes
) -> tuple[dict[str, Any], bytes] | None:
    """Compiles the model on a rank and trains it with `fit`.

    Rank 0 returns the history and the last checkpoint, other ranks return None.
    """
    import keras

    objects = cloudpickle.loads(custom_objects)
    with ringjax_initialized(), keras.saving.custom_object_scope(objects):
        if job.seeded:
            keras.utils.set_random_seed(job.seed)
        if job.use_gpu:
            _select_gpu(keras.backend.backend())
        spec: Spec = cloudpickle.loads(data)
        keras.config.set_floatx(spec["floatx"])
        _compile(keras, spec)
        return _fit(keras, job, spec)


def _compile(keras: Keras, spec: Spec) -> None:
    hvd = importlib.import_module("ringjax.keras")
    optimizer = spec["optimizer"]
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if not isinstance(optimizer._learning_rate, schedule):
        optimizer.learning_rate = float(optimizer.learning_rate) * runtime.size()
    for callback in spec["callbacks"]:
        if hasattr(callback, "initial_lr"):
            callback.initial_lr = float(optimizer.learning_rate)
    compression = spec["gradient_compression"]
    spec["model"].compile(
        hvd.DistributedOptimizer(optimizer, compression=compression),
        loss=spec["loss"],
        loss_weights=spec["loss_weights"],
        metrics=spec["metrics"] or None,
    )


def _fit(
    keras: Keras, job: TrainingJob, spec: Spec
) -> tuple[dict[str, Any], bytes] | None:
    hvd = importlib.import_module("ringjax.keras")
    first = 0
    state: dict[str, Any] = {}
    if job.checkpoint:
        state = _restore(spec["model"], job.checkpoint)
        first = int(state["epochs"])
    left = job.epochs - first if first < job.epochs else job.epochs
    keeper = _checkpoint_callback(keras, job, state.get("history", {}))
    folder = job.store.get_local_output_dir_fn(job.run_id)
    with folder() as path:
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            *spec["callbacks"],
        ]
        best = spec["checkpoint_callback"]
        file = os.path.join(path, "checkpoint.keras")
        if runtime.rank() == 0:
            if best is not None:
                best.filepath = file
                callbacks.append(best)
            callbacks.append(keeper)
        batches = _KerasBatches(spec["model"], job, spec["label_shapes"])
        spec["model"].fit(
            batches.training(first),
            steps_per_epoch=job.epoch_steps,
            initial_epoch=first,
            epochs=first + left,
            shuffle=False,  # the job itself shuffles the rows
            validation_data=_validation(keras, job, batches),
            callbacks=callbacks,
            verbose=job.verbose if runtime.rank() == 0 else 0,
        )
        if runtime.rank() != 0:
            return None
        if os.path.exists(file):
            keeper.save(keras.saving.load_model(file, compile=False).get_weights())
        return keeper.history, keeper.checkpoint


def _validation(keras: Keras, job: TrainingJob, batches: _KerasBatches) -> Any:
    """Returns the validation batches as a dataset, which each epoch reads again.

    Keras reads a batch in advance to learn its structure. A generator would lose that
    batch, so this is a dataset that can be read from any index.
    """
    if job.val_rows is None:
        return None
    steps = job.val_steps or job.val_rows.steps(runtime.size(), job.val_batch_size)

    class Validation(keras.utils.PyDataset):
        def __init__(self) -> None:
            super().__init__()
            self._next, self._batches = 0, job.validation_batches()

        def __len__(self) -> int:
            return int(steps)

        def __getitem__(self, number: int) -> FitBatch:
            if number != self._next:
                again = job.validation_batches()
                self._batches = itertools.islice(again, number, None)
            self._next = number + 1
            return batches.convert(next(self._batches))

    return Validation()


class _KerasBatches:
    """Converts batches for `fit`: inputs, labels and weights."""

    def __init__(
        self,
        model: Model,
        job: TrainingJob,
        label_shapes: Sequence[Sequence[int]] | None,
    ) -> None:
        self._job = job
        self._inputs = [x.shape[1:] for x in model.inputs]
        self._labels = [x.shape[1:] for x in model.outputs]
        if label_shapes:
            skip = [1 if shape[0] == -1 else 0 for shape in label_shapes]
            pairs = zip(label_shapes, skip, strict=True)
            self._labels = [tuple(shape[n:]) for shape, n in pairs]

    def training(self, first_epoch: int) -> Iterator[FitBatch]:
        """Yields the training batches, epoch after epoch, without an end."""
        # `fit` accepts a generator, but no other iterator.
        for batch in self._job.batches(first_epoch):
            yield self.convert(batch)

    def convert(self, batch: Batch) -> FitBatch:
        """Converts a batch to inputs, labels and weights."""
        columns, job = batch.columns, self._job
        inputs = [
            reshape(columns[name], shape)
            for name, shape in zip(job.features, self._inputs, strict=True)
        ]
        labels = [
            reshape(columns[name], shape)
            for name, shape in zip(job.labels, self._labels, strict=True)
        ]
        # Keras divides the loss by the rows of this rank; `Batch.share` corrects that.
        weights = np.full(len(labels[0]), batch.share, np.float32)
        if job.weight is not None:
            weights *= columns[job.weight].astype(np.float32)
        if len(labels) == 1:
            return _unwrap_single(inputs), labels[0], weights
        return _unwrap_single(inputs), tuple(labels), tuple(weights for _ in labels)


def _unwrap_single(arrays: list[Array]) -> Arrays:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def reshape(values: Array, shape: Sequence[int | None]) -> Array:
    """Reshapes an array of [rows, ...] for an input or output; float64 becomes float32.

    `shape` is the shape of a row. If an unknown dimension (None) is in it, or if the
    rows have another number of values, the shape of the array stays as it is.
    """
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    size = int(np.prod([n or 0 for n in shape]))
    if size and size * len(values) == values.size:
        return values.reshape(len(values), *(n or 0 for n in shape))
    return values


def _restore(model: Model, checkpoint: bytes) -> dict[str, Any]:
    state: dict[str, Any] = cloudpickle.loads(checkpoint)
    model.set_weights(state["weights"])
    model.optimizer.build(model.trainable_variables)
    variables = _checkpointed_variables(model)
    for variable, value in zip(variables, state["optimizer"], strict=True):
        variable.assign(value)
    return state


def _checkpointed_variables(model: Model) -> list[Any]:
    """Returns the optimizer's variables, without the scaled learning rate."""
    rate = model.optimizer._learning_rate
    return [v for v in model.optimizer.variables if v is not rate]


def _checkpoint_callback(
    keras: Keras, job: TrainingJob, history: dict[str, Any]
) -> Any:
    """Makes a callback that saves a checkpoint after each epoch."""

    class CheckpointKeeper(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.history = {name: list(values) for name, values in history.items()}
            self.checkpoint, self.epochs = b"", 0

        def on_epoch_end(
            self, epoch: int, logs: dict[str, float] | None = None
        ) -> None:
            for name, value in (logs or {}).items():
                self.history.setdefault(name, []).append(float(value))
            self.epochs = epoch + 1
            self.save(self.model.get_weights())

        def save(self, weights: list[Array]) -> None:
            variables = _checkpointed_variables(self.model)
            state = {
                "weights": weights,
                "optimizer": [keras.ops.convert_to_numpy(v) for v in variables],
                "history": self.history,
                "epochs": self.epochs,
            }
            self.checkpoint = cloudpickle.dumps(state)
            job.save(self.checkpoint)

    return CheckpointKeeper()


def _select_gpu(backend: str) -> None:
    """Makes Keras use one GPU of this rank; for JAX, `ringjax.init` selects the GPU."""
    if backend == "tensorflow":
        config = importlib.import_module("tensorflow").config
        if gpus := config.list_physical_devices("GPU"):
            own = gpus[runtime.local_rank() % len(gpus)]
            config.set_visible_devices(own, "GPU")
            config.experimental.set_memory_growth(own, True)
    elif backend == "torch":
        cuda = importlib.import_module("torch").cuda
        if count := cuda.device_count():
            cuda.set_device(runtime.local_rank() % count)


def predictor(
    backend: str, model: bytes, custom_objects: bytes
) -> Callable[[Sequence[Array]], list[Array]]:
    """Makes a function that computes the outputs of a pickled model from columns."""
    os.environ["KERAS_BACKEND"] = backend
    loaded = unpickle_model(model, custom_objects)
    shapes = [x.shape[1:] for x in loaded.inputs]

    def predict(columns: Sequence[Array]) -> list[Array]:
        pairs = zip(columns, shapes, strict=True)
        inputs = [reshape(column, shape) for column, shape in pairs]
        outputs = loaded.predict_on_batch(_unwrap_single(inputs))
        found = outputs if isinstance(outputs, list | tuple) else [outputs]
        return [np.asarray(output) for output in found]

    return predict
