"""A PyTorch model in the ranks of an estimator, and in the tasks that predict."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch

import ringjax.torch as hvd
from ringjax.spark.common.parquet_rows import Batch
from ringjax.spark.common.training_loop import (
    History,
    TrainingJob,
    batch_shape,
    group_metrics,
)

Shapes = Sequence[Sequence[int]] | None


class TorchModelTrainer:
    """A model, its optimizer and its losses.

    Args:
        job: the rows, and how to go through them.
        spec: model, optimizer and losses pickled, and the other Params.
    """

    def __init__(self, job: TrainingJob, spec: bytes) -> None:
        given: dict[str, Any] = cloudpickle.loads(spec)
        self._job, self._spec = job, given
        if job.seeded:
            torch.manual_seed(job.seed)
        self._device = torch.device("cpu")
        if job.use_gpu and torch.cuda.is_available():
            number = hvd.local_rank() % torch.cuda.device_count()
            torch.cuda.set_device(number)
            self._device = torch.device("cuda", number)
        self._model = given["model"].to(self._device)
        plain = bind_optimizer(given["optimizer"], self._model)
        plain.load_state_dict(scale_learning_rate(plain.state_dict(), hvd.size()))
        compression = given["gradient_compression"]
        self._optimizer = hvd.DistributedOptimizer(
            plain,
            named_parameters=self._model.named_parameters(),
            backward_passes_per_step=given["backward_passes_per_step"],
            **({"compression": compression} if compression else {}),
        )
        self._losses = given["loss"]
        if given["loss_constructors"]:
            self._losses = [make() for make in given["loss_constructors"]]
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        self._minibatch = given["train_minibatch_fn"] or self._minibatch_step
        self._passes = 0

    def train_step(self, batch: Batch) -> list[float]:
        """A step; the means of the loss and of all metrics over its rows."""
        self._model.train()

        def loss(outputs: Any, labels: Any, weights: Any = None) -> Any:
            return self._loss(outputs, labels, weights) * batch.share

        given = self._to_tensors(batch)
        outputs, value = self._minibatch(
            self._model, self._optimizer, self._match_labels, loss, *given
        )
        mean = float(value.detach()) / batch.share if batch.rows else 0.0
        return [mean, *self._metrics(*self._match_labels(outputs, given[1]))]

    def validation_step(self, batch: Batch) -> list[float]:
        """The same means without a step."""
        self._model.eval()
        inputs, labels, weights = self._to_tensors(batch)
        with torch.no_grad():
            outputs, labels = self._match_labels(self._model(*inputs), labels)
            mean = float(self._loss(outputs, labels, weights))
        return [mean, *self._metrics(outputs, labels)]

    def name_means(self, means: Sequence[float]) -> dict[str, Any]:
        """The loss, and the metrics in their groups."""
        return group_metrics(means, self._job.labels, self._spec["metrics"])

    def dumps(self, history: History) -> bytes:
        """A checkpoint, with the learning rate of one rank."""
        state = {
            "model": _on_cpu(self._model.state_dict()),
            "optimizer": scale_learning_rate(
                _on_cpu(self._optimizer.state_dict()), 1 / hvd.size()
            ),
            "history": history,
        }
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue()

    def loads(self, checkpoint: bytes) -> History:
        """Goes on from a checkpoint; its history."""
        state = load_checkpoint(checkpoint)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(
            scale_learning_rate(state["optimizer"], hvd.size())
        )
        history: History = state["history"]
        return history

    def _minibatch_step(
        self,
        model: Any,
        optimizer: Any,
        alike: Callable[..., Any],
        loss_fn: Callable[..., Any],
        inputs: Sequence[Any],
        labels: Sequence[Any],
        weights: Any,
    ) -> tuple[Any, Any]:
        """What `train_minibatch_fn` may do otherwise."""
        every = self._spec["backward_passes_per_step"]
        if self._passes % every == 0:
            optimizer.zero_grad()
        self._passes += 1
        outputs, labels = alike(model(*inputs), labels)
        loss = loss_fn(outputs, labels, weights)
        loss.backward()
        if self._passes % every == 0:
            optimizer.step()
        return outputs, loss

    def _to_tensors(self, batch: Batch) -> tuple[list[Any], list[Any], Any]:
        columns, job = batch.columns, self._job
        shapes = self._spec["input_shapes"] or [None] * len(job.features)
        inputs = [
            tensor(columns[name], shape).to(self._device)
            for name, shape in zip(job.features, shapes, strict=True)
        ]
        labels = [tensor(columns[name]).to(self._device) for name in job.labels]
        weights = None
        if job.weight is not None:
            weights = tensor(columns[job.weight]).to(self._device)
        return inputs, labels, weights

    def _match_labels(
        self, outputs: Any, labels: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Outputs as a list, and labels in the shapes that were given, or in theirs."""
        found = outputs if isinstance(outputs, list | tuple) else [outputs]
        shapes = self._spec["label_shapes"]
        if shapes:
            pairs = zip(labels, shapes, strict=True)
            return found, [x.reshape(batch_shape(shape)) for x, shape in pairs]
        return found, [
            x.reshape(y.shape) if x.numel() == y.numel() else x
            for x, y in zip(labels, found, strict=True)
        ]

    def _loss(self, outputs: Sequence[Any], labels: Sequence[Any], weights: Any) -> Any:
        """The mean over the rows, of all losses with their weights."""
        total = 0.0
        for output, label, loss, weight in zip(
            outputs, labels, self._losses, self._spec["loss_weights"], strict=True
        ):
            if weights is None:
                total = total + weight * loss(output, label).mean()
                continue
            rows = _row_losses(loss, output, label)
            each = rows.reshape(len(rows), -1).mean(1) if rows.ndim > 1 else rows
            total = total + weight * (each * weights).mean()
        return total

    def _metrics(self, outputs: Sequence[Any], labels: Sequence[Any]) -> list[float]:
        found = []
        with torch.no_grad():
            for group in self._spec["metrics"]:
                functions = group * len(labels) if len(group) == 1 else group
                for metric, output, label in zip(
                    functions, outputs, labels, strict=True
                ):
                    value = metric(output, label)
                    found.append(float(torch.as_tensor(value).float().mean()))
        return found


def _row_losses(loss: Any, output: Any, label: Any) -> Any:
    if isinstance(loss, torch.nn.Module):
        loss = copy.copy(loss)
        loss.reduction = "none"
        return loss(output, label)
    return loss(output, label, reduction="none")


def bind_optimizer(optimizer: Any, model: Any) -> Any:
    """The optimizer, or one like it if its parameters are not those of the model."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if own <= {id(parameter) for parameter in model.parameters()}:
        return optimizer
    found = type(optimizer)(model.parameters(), lr=1)
    found.load_state_dict(optimizer.state_dict())
    return found


def scale_learning_rate(state: dict[str, Any], factor: float) -> dict[str, Any]:
    """An optimizer's state with other learning rates."""
    groups = [{**g, "lr": g["lr"] * factor} for g in state["param_groups"]]
    return {**state, "param_groups": groups}


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(x) for key, x in value.items()}
    return [_on_cpu(x) for x in value] if isinstance(value, list) else value


def load_checkpoint(checkpoint: bytes) -> dict[str, Any]:
    """The states of model and optimizer, and the history; nothing in it is run."""
    state: dict[str, Any] = torch.load(
        io.BytesIO(checkpoint), map_location="cpu", weights_only=True
    )
    return state


def tensor(values: np.ndarray[Any, Any], shape: Sequence[int] | None = None) -> Any:
    """Rows as float32, each in a shape."""
    found = torch.from_numpy(np.array(values, np.float32))
    return found if shape is None else found.reshape(batch_shape(shape))


def predictor(
    model: bytes, input_shapes: Shapes
) -> Callable[[Sequence[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]]]:
    """A function from columns to the outputs of a pickled model."""
    loaded = cloudpickle.loads(model).eval()

    def predict(columns: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        shapes: Any = input_shapes or [None] * len(columns)
        pairs = zip(columns, shapes, strict=True)
        with torch.no_grad():
            outputs = loaded(*(tensor(column, shape) for column, shape in pairs))
        found = outputs if isinstance(outputs, list | tuple) else [outputs]
        return [output.numpy() for output in found]

    return predict
