"""A Keras model in the ranks of an estimator, and in the tasks that predict.

Keras is imported when it is used: which backend it has must be said before.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from ringjax import runtime
from ringjax.spark.common.parquet_rows import Batch
from ringjax.spark.common.training_loop import TrainingJob, ringjax_initialized

Array = np.ndarray[Any, Any]


def unpickle_model(data: bytes, custom_objects: bytes) -> Any:
    """A model, or what has one in it, with the program's own classes by name."""
    import keras

    with keras.saving.custom_object_scope(cloudpickle.loads(custom_objects)):
        return cloudpickle.loads(data)


def train(
    custom_objects: bytes, job: TrainingJob, data: bytes
) -> tuple[dict[str, Any], bytes] | None:
    """What each rank does: compiles the model, and trains it with `fit`.

    Returns:
        On rank 0 the history and the last checkpoint.
    """
    import keras

    objects = cloudpickle.loads(custom_objects)
    with ringjax_initialized(), keras.saving.custom_object_scope(objects):
        if job.seeded:
            keras.utils.set_random_seed(job.seed)
        if job.use_gpu:
            _select_gpu(keras.backend.backend())
        spec: dict[str, Any] = cloudpickle.loads(data)
        keras.config.set_floatx(spec["floatx"])
        _compile(keras, spec)
        return _fit(keras, job, spec)


def _compile(keras: Any, spec: dict[str, Any]) -> None:
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
    keras: Any, job: TrainingJob, spec: dict[str, Any]
) -> tuple[dict[str, Any], bytes] | None:
    hvd = importlib.import_module("ringjax.keras")
    first = 0
    before: dict[str, Any] = {}
    if job.checkpoint:
        before = _resume(spec["model"], job.checkpoint)
        first = int(before["epochs"])
    left = job.epochs - first if first < job.epochs else job.epochs
    keep = _checkpoint_callback(keras, job, before.get("history", {}))
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
            callbacks.append(keep)
        shaped = _KerasBatches(spec["model"], job, spec["label_shapes"])
        spec["model"].fit(
            (shaped(batch) for batch in job.stream(first)),
            steps_per_epoch=job.epoch_steps,
            initial_epoch=first,
            epochs=first + left,
            shuffle=False,  # the rows come in another order each time
            validation_data=_validation(keras, job, shaped),
            callbacks=callbacks,
            verbose=job.verbose if runtime.rank() == 0 else 0,
        )
        if runtime.rank() != 0:
            return None
        if os.path.exists(file):
            keep.save(keras.saving.load_model(file, compile=False).get_weights())
        return keep.history, keep.checkpoint


def _validation(keras: Any, job: TrainingJob, shaped: _KerasBatches) -> Any:
    """The same batches in each epoch; a generator would lose what Keras looks at."""
    if job.val_rows is None:
        return None
    steps = job.val_steps or job.val_rows.steps(runtime.size(), job.val_batch_size)

    class Validation(keras.utils.PyDataset):
        def __init__(self) -> None:
            super().__init__()
            self._next, self._batches = 0, job.validation()

        def __len__(self) -> int:
            return int(steps)

        def __getitem__(self, number: int) -> Any:
            if number != self._next:
                self._batches = itertools.islice(job.validation(), number, None)
            self._next = number + 1
            return shaped(next(self._batches))

    return Validation()


class _KerasBatches:
    """Batches as `fit` takes them: inputs, labels and weights."""

    def __init__(self, model: Any, job: TrainingJob, label_shapes: Any) -> None:
        self._job = job
        self._inputs = [x.shape[1:] for x in model.inputs]
        self._labels = [x.shape[1:] for x in model.outputs]
        if label_shapes:
            skip = [1 if shape[0] == -1 else 0 for shape in label_shapes]
            pairs = zip(label_shapes, skip, strict=True)
            self._labels = [tuple(shape[n:]) for shape, n in pairs]

    def __call__(self, batch: Batch) -> tuple[Any, Any, Any]:
        columns, job = batch.columns, self._job
        inputs = [
            shaped(columns[name], shape)
            for name, shape in zip(job.features, self._inputs, strict=True)
        ]
        labels = [
            shaped(columns[name], shape)
            for name, shape in zip(job.labels, self._labels, strict=True)
        ]
        # Keras divides by the rows of this rank; see `Batch.share`.
        weights = np.full(len(labels[0]), batch.share, np.float32)
        if job.weight is not None:
            weights *= columns[job.weight].astype(np.float32)
        if len(labels) == 1:
            return _unwrap_single(inputs), labels[0], weights
        return _unwrap_single(inputs), tuple(labels), tuple(weights for _ in labels)


def _unwrap_single(arrays: list[Array]) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def shaped(values: Array, shape: Sequence[int | None]) -> Array:
    """Rows in the shape of an input or output, if they have as many values.

    Args:
        values: [rows, ...]; float64 becomes float32.
        shape: of a row; None where it is not known.
    """
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    size = int(np.prod([n or 0 for n in shape]))
    if size and size * len(values) == values.size:
        return values.reshape(len(values), *(n or 0 for n in shape))
    return values


def _resume(model: Any, checkpoint: bytes) -> dict[str, Any]:
    state: dict[str, Any] = cloudpickle.loads(checkpoint)
    model.set_weights(state["weights"])
    model.optimizer.build(model.trainable_variables)
    for variable, value in zip(
        _checkpointed_variables(model), state["optimizer"], strict=True
    ):
        variable.assign(value)
    return state


def _checkpointed_variables(model: Any) -> list[Any]:
    """The variables of its optimizer, without the learning rate, which is scaled."""
    rate = model.optimizer._learning_rate
    return [v for v in model.optimizer.variables if v is not rate]


def _checkpoint_callback(keras: Any, job: TrainingJob, history: dict[str, Any]) -> Any:
    """Keeps a checkpoint after each epoch, and what was measured."""

    class CheckpointKeeper(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.history = {name: list(values) for name, values in history.items()}
            self.checkpoint, self.epochs = b"", 0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            for name, value in (logs or {}).items():
                self.history.setdefault(name, []).append(float(value))
            self.epochs = epoch + 1
            self.save(self.model.get_weights())

        def save(self, weights: list[Array]) -> None:
            numpy = keras.ops.convert_to_numpy
            state = {
                "weights": weights,
                "optimizer": [numpy(v) for v in _checkpointed_variables(self.model)],
                "history": self.history,
                "epochs": self.epochs,
            }
            self.checkpoint = cloudpickle.dumps(state)
            job.save(self.checkpoint)

    return CheckpointKeeper()


def _select_gpu(backend: str) -> None:
    """Has this rank use one of the GPUs that it sees; JAX's are ringjax's to choose."""
    if backend == "tensorflow":
        config = importlib.import_module("tensorflow").config
        if gpus := config.list_physical_devices("GPU"):
            mine = gpus[runtime.local_rank() % len(gpus)]
            config.set_visible_devices(mine, "GPU")
            config.experimental.set_memory_growth(mine, True)
    elif backend == "torch":
        cuda = importlib.import_module("torch").cuda
        if count := cuda.device_count():
            cuda.set_device(runtime.local_rank() % count)


def predictor(
    backend: str, model: bytes, custom_objects: bytes
) -> Callable[[Sequence[Array]], list[Array]]:
    """A function from columns to the outputs of a pickled model."""
    os.environ["KERAS_BACKEND"] = backend
    loaded = unpickle_model(model, custom_objects)
    shapes = [x.shape[1:] for x in loaded.inputs]

    def predict(columns: Sequence[Array]) -> list[Array]:
        pairs = zip(columns, shapes, strict=True)
        outputs = loaded.predict_on_batch(
            _unwrap_single([shaped(x, s) for x, s in pairs])
        )
        found = outputs if isinstance(outputs, list | tuple) else [outputs]
        return [np.asarray(output) for output in found]

    return predict
