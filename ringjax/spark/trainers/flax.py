"""A Flax model in the ranks of an estimator, and in the tasks that predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ringjax.compression import Compression
from ringjax.optim import allreduce_grads
from ringjax.spark.common.parquet_rows import Batch
from ringjax.spark.common.training_loop import (
    History,
    TrainingJob,
    batch_shape,
    group_metrics,
)
from ringjax.sync import broadcast_parameters

Array = np.ndarray[Any, Any]


class FlaxModelTrainer:
    """A module and its optimizer; a step is one compiled program.

    Args:
        job: the rows, and how to go through them.
        spec: module, optimizer and losses pickled, and the other Params.
    """

    def __init__(self, job: TrainingJob, spec: bytes) -> None:
        self._job = job
        self._params: Any = None
        self._rest: Any = None
        self._spec: dict[str, Any] = cloudpickle.loads(spec)
        compression = self._spec["gradient_compression"] or Compression.none
        self._tx = optax.chain(
            allreduce_grads(compression=compression), self._spec["optimizer"]
        )
        self._split_model(self._spec["model"])
        self._state = self._tx.init(self._params)
        self._params = broadcast_parameters(self._params, root_rank=0)
        self._learn = jax.jit(self._step, donate_argnums=(0, 1, 2))
        self._judge = jax.jit(lambda *given: self._forward(self._graph, *given)[0])

    def _split_model(self, model: Any) -> None:
        model.eval()
        self._graph = nnx.split(model)[0]
        model.train()
        self._training = nnx.split(model)[0]
        parts: Any = nnx.split(model, nnx.Param, ...)
        self._params, self._rest = parts[1:]

    def train_step(self, batch: Batch) -> list[float]:
        """A step; the means of the loss and of all metrics over its rows."""
        given = self._to_arrays(batch, self._job.batch_size)
        found: Any = self._learn(self._params, self._rest, self._state, *given)
        self._params, self._rest, self._state, means = found
        return [float(mean) for mean in means]

    def validation_step(self, batch: Batch) -> list[float]:
        """The same means without a step."""
        given = self._to_arrays(batch, self._job.val_batch_size)
        return [float(mean) for mean in self._judge(self._params, self._rest, *given)]

    def name_means(self, means: Sequence[float]) -> dict[str, Any]:
        """The loss, and the metrics in their groups."""
        return group_metrics(means, self._job.labels, self._spec["metrics"])

    def dumps(self, history: History) -> bytes:
        """A checkpoint."""
        model = nnx.merge(self._graph, self._params, self._rest)
        state = {
            "model": model,
            "optimizer": jax.tree.map(np.asarray, self._state),
            "history": history,
        }
        checkpoint: bytes = cloudpickle.dumps(state)
        return checkpoint

    def loads(self, checkpoint: bytes) -> History:
        """Goes on from a checkpoint; its history."""
        state = cloudpickle.loads(checkpoint)
        self._split_model(state["model"])
        self._state = jax.tree.map(jnp.asarray, state["optimizer"])
        history: History = state["history"]
        return history

    def _to_arrays(self, batch: Batch, size: int) -> tuple[Any, ...]:
        """Inputs, labels, weights of the rows, and how many rows count.

        Always as many rows as a batch has, so that one program does: copies have no
        weight.
        """
        columns, job = batch.columns, self._job
        shapes = self._spec["input_shapes"] or [None] * len(job.features)
        inputs = [
            array(columns[name], shape, size)
            for name, shape in zip(job.features, shapes, strict=True)
        ]
        labels = [array(columns[name], None, size) for name in job.labels]
        weights = np.zeros(size, np.float32)
        weights[: batch.rows] = 1.0
        if job.weight is not None:
            weights *= array(columns[job.weight], None, size)
        return inputs, labels, weights, np.float32(batch.rows)

    def _step(self, params: Any, rest: Any, state: Any, *given: Any) -> tuple[Any, ...]:
        def loss(params: Any) -> Any:
            means, rest_ = self._forward(self._training, params, rest, *given)
            return means[0], (means, rest_)

        grads, (means, rest) = jax.grad(loss, has_aux=True)(params)
        updates, state = self._tx.update(grads, state, params, weight=given[-1])
        return optax.apply_updates(params, updates), rest, state, means

    def _forward(
        self,
        graph: Any,
        params: Any,
        rest: Any,
        inputs: Sequence[Any],
        labels: Sequence[Any],
        weights: Any,
        rows: Any,
    ) -> tuple[list[Any], Any]:
        """The means over the rows that count, and what the module has changed."""
        model = nnx.merge(graph, params, rest, copy=True)
        outputs = model(*inputs)
        outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        labels = [
            x.reshape(y.shape) if x.size == y.size else x
            for x, y in zip(self._shape_labels(labels), outputs, strict=True)
        ]
        count = jnp.maximum(rows, 1.0)

        def mean(function: Any, output: Any, label: Any, weights: Any) -> Any:
            values = function(output, label).astype(jnp.float32)
            if values.shape[:1] != weights.shape:
                raise ValueError(
                    f"a loss or metric gave an array of shape {list(values.shape)}; "
                    f"expected a value for each of {len(weights)} rows, not their mean"
                )
            return (values.reshape(len(weights), -1).mean(1) * weights).sum() / count

        spec, there = self._spec, (jnp.arange(len(weights)) < rows).astype(jnp.float32)
        pairs = list(zip(outputs, labels, strict=True))
        means = [
            sum(
                weight * mean(loss, *pair, weights)
                for loss, weight, pair in zip(
                    spec["loss"], spec["loss_weights"], pairs, strict=True
                )
            )
        ]
        for group in spec["metrics"]:
            functions = group * len(pairs) if len(group) == 1 else group
            means += [mean(f, *p, there) for f, p in zip(functions, pairs, strict=True)]
        parts: Any = nnx.split(model, nnx.Param, ...)
        return means, parts[2]

    def _shape_labels(self, labels: Sequence[Any]) -> Sequence[Any]:
        shapes = self._spec["label_shapes"]
        if not shapes:
            return labels
        pairs = zip(labels, shapes, strict=True)
        return [label.reshape(batch_shape(shape)) for label, shape in pairs]


def array(values: Array, shape: Sequence[int] | None, rows: int | None = None) -> Array:
    """Rows as JAX takes them, each in a shape; as many as asked for, by repeating them.

    Args:
        values: [rows, ...]; float64 becomes float32, and int64 int32.
        shape: of a row, with -1 or nothing for the rows.
        rows: how many there shall be.
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
    """A function from columns to the outputs of a pickled module."""
    module = cloudpickle.loads(model)
    module.eval()
    graph, state = nnx.split(module)
    call = jax.jit(lambda state, *inputs: nnx.merge(graph, state, copy=True)(*inputs))

    def predict(columns: Sequence[Array]) -> list[Array]:
        count = len(columns[0])
        rows = 1 << (count - 1).bit_length()  # few programs for many numbers of rows
        shapes: Any = input_shapes or [None] * len(columns)
        pairs = zip(columns, shapes, strict=True)
        outputs = call(state, *(array(x, shape, rows) for x, shape in pairs))
        found = outputs if isinstance(outputs, list | tuple) else [outputs]
        return [np.asarray(output)[:count] for output in found]

    return predict
