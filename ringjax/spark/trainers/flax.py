"""Trains a Flax model in the ranks of an estimator, and predicts in Spark tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ringjax.compression import Compression
from ringjax.optim import allreduce_grads
from ringjax.spark.common.parquet_rows import Array, Batch
from ringjax.spark.common.training_loop import History, TrainingJob, batch_shape
from ringjax.sync import broadcast_parameters

Module: TypeAlias = Any
"""An `nnx.Module`, whose methods have no types."""

State: TypeAlias = nnx.State[Any, Any]
RowFunction: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""A loss or metric: computes a value or an array for each row."""


class FlaxModelTrainer:
    """Trains a Flax module (see `ModelTrainer`). A step is one compiled program.

    `spec` is the pickled module, optimizer, losses and other Params.
    """

    def __init__(self, job: TrainingJob, spec: bytes) -> None:
        self._job = job
        self._params: State
        self._rest: State
        self._spec: dict[str, Any] = cloudpickle.loads(spec)
        self.metrics: list[Any] = self._spec["metrics"]
        compression = self._spec["gradient_compression"] or Compression.none
        self._tx = optax.chain(
            allreduce_grads(compression=compression), self._spec["optimizer"]
        )
        self._split_model(self._spec["model"])
        self._state = self._tx.init(self._params)
        self._params = broadcast_parameters(self._params, root_rank=0)
        self._train = jax.jit(self._step, donate_argnums=(0, 1, 2))
        self._validate = jax.jit(lambda *args: self._forward(self._graph, *args)[0])

    def _split_model(self, model: Module) -> None:
        model.eval()
        self._graph = nnx.split(model)[0]
        model.train()
        self._training = nnx.split(model)[0]
        parts: Any = nnx.split(model, nnx.Param, ...)
        self._params, self._rest = parts[1:]

    def train_step(self, batch: Batch) -> list[float]:
        arrays = self._to_arrays(batch, self._job.batch_size)
        found: Any = self._train(self._params, self._rest, self._state, *arrays)
        self._params, self._rest, self._state, means = found
        return [float(mean) for mean in means]

    def validation_step(self, batch: Batch) -> list[float]:
        arrays = self._to_arrays(batch, self._job.val_batch_size)
        means = self._validate(self._params, self._rest, *arrays)
        return [float(mean) for mean in means]

    def dumps(self, history: History) -> bytes:
        model = nnx.merge(self._graph, self._params, self._rest)
        state = {
            "model": model,
            "optimizer": jax.tree.map(np.asarray, self._state),
            "history": history,
        }
        checkpoint: bytes = cloudpickle.dumps(state)
        return checkpoint

    def loads(self, checkpoint: bytes) -> History:
        state = cloudpickle.loads(checkpoint)
        self._split_model(state["model"])
        self._state = jax.tree.map(jnp.asarray, state["optimizer"])
        history: History = state["history"]
        return history

    def _to_arrays(
        self, batch: Batch, size: int
    ) -> tuple[list[Array], list[Array], Array, np.float32]:
        """Returns inputs, labels, weights of the rows, and the number of rows.

        The arrays always have `size` rows, so that JAX compiles one program. Missing
        rows are filled up by copies with the weight 0.
        """
        columns, job = batch.columns, self._job
        shapes = self._spec["input_shapes"] or [None] * len(job.features)
        inputs = [
            to_array(columns[name], shape, size)
            for name, shape in zip(job.features, shapes, strict=True)
        ]
        labels = [to_array(columns[name], None, size) for name in job.labels]
        weights = np.zeros(size, np.float32)
        weights[: batch.rows] = 1.0
        if job.weight is not None:
            weights *= to_array(columns[job.weight], None, size)
        return inputs, labels, weights, np.float32(batch.rows)

    def _step(
        self, params: State, rest: State, state: optax.OptState, *arrays: Any
    ) -> tuple[Any, ...]:
        def loss(params: State) -> tuple[jax.Array, tuple[Any, State]]:
            means, new_rest = self._forward(self._training, params, rest, *arrays)
            return means[0], (means, new_rest)

        grads, (means, rest) = jax.grad(loss, has_aux=True)(params)
        updates, state = self._tx.update(grads, state, params, weight=arrays[-1])
        return optax.apply_updates(params, updates), rest, state, means

    def _forward(
        self, graph: nnx.GraphDef[nnx.Module], params: State, rest: State, *arrays: Any
    ) -> tuple[list[jax.Array], State]:
        """Returns losses and metrics as means over the real rows, and further state."""
        inputs, labels, weights, rows = arrays
        model = nnx.merge(graph, params, rest, copy=True)
        outputs = model(*inputs)
        outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        labels = [
            x.reshape(y.shape) if x.size == y.size else x
            for x, y in zip(self._shape_labels(labels), outputs, strict=True)
        ]
        count = jnp.maximum(rows, 1.0)

        def mean(
            function: RowFunction,
            output: jax.Array,
            label: jax.Array,
            weights: jax.Array,
        ) -> jax.Array:
            values = function(output, label).astype(jnp.float32)
            if values.shape[:1] != weights.shape:
                raise ValueError(
                    f"a loss or metric gave an array of shape {list(values.shape)}; "
                    f"expected a value for each of {len(weights)} rows, not their mean"
                )
            return (values.reshape(len(weights), -1).mean(1) * weights).sum() / count

        spec = self._spec
        counted = (jnp.arange(len(weights)) < rows).astype(jnp.float32)
        pairs = list(zip(outputs, labels, strict=True))
        means: list[Any] = [
            sum(
                weight * mean(loss, *pair, weights)
                for loss, weight, pair in zip(
                    spec["loss"], spec["loss_weights"], pairs, strict=True
                )
            )
        ]
        for group in self.metrics:
            functions = group * len(pairs) if len(group) == 1 else group
            means += [
                mean(f, *p, counted) for f, p in zip(functions, pairs, strict=True)
            ]
        parts: Any = nnx.split(model, nnx.Param, ...)
        return means, parts[2]

    def _shape_labels(self, labels: Sequence[jax.Array]) -> Sequence[jax.Array]:
        shapes = self._spec["label_shapes"]
        if not shapes:
            return labels
        pairs = zip(labels, shapes, strict=True)
        return [label.reshape(batch_shape(shape)) for label, shape in pairs]


def to_array(
    values: Array, shape: Sequence[int] | None, rows: int | None = None
) -> Array:
    """Converts an array of [rows, ...] to JAX's dtypes, and reshapes it.

    float64 becomes float32, and int64 int32. `shape` is the shape of a row, after -1 or
    without it. The result has `rows` rows, which are repeated or cut off.
    """
    found = np.asarray(values, jax.dtypes.canonicalize_dtype(values.dtype))
    if found.dtype == np.float64:
        found = found.astype(np.float32)
    if shape is not None:
        found = found.reshape(batch_shape(shape))
    if rows is not None and rows != len(found):
        found = np.resize(found, (rows, *found.shape[1:]))
    return found


def predictor(
    model: bytes, input_shapes: Sequence[Sequence[int]] | None
) -> Callable[[Sequence[Array]], list[Array]]:
    """Makes a function that computes the outputs of a pickled module from columns."""
    module = cloudpickle.loads(model)
    module.eval()
    graph, state = nnx.split(module)
    call = jax.jit(lambda state, *inputs: nnx.merge(graph, state, copy=True)(*inputs))

    def predict(columns: Sequence[Array]) -> list[Array]:
        count = len(columns[0])
        # Round up to a power of two, so that JAX compiles few programs for all batches.
        rows = 1 << (count - 1).bit_length()
        shapes: Sequence[Sequence[int] | None] = input_shapes or [None] * len(columns)
        pairs = zip(columns, shapes, strict=True)
        outputs = call(state, *(to_array(x, shape, rows) for x, shape in pairs))
        found = outputs if isinstance(outputs, list | tuple) else [outputs]
        return [np.asarray(output)[:count] for output in found]

    return predict
