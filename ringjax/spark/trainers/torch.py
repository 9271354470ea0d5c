"""Trains a PyTorch model in the ranks of an estimator, and predicts in Spark tasks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import torch

import ringjax.torch as hvd
from ringjax.spark.common.parquet_rows import Array, Batch
from ringjax.spark.common.training_loop import History, TrainingJob, batch_shape

Loss: TypeAlias = Callable[..., torch.Tensor]
Tensors: TypeAlias = Sequence[torch.Tensor]
Shapes: TypeAlias = Sequence[Sequence[int]] | None


class TorchModelTrainer:
    """Trains a PyTorch model; see `ModelTrainer`.

    `spec` is the pickled model, optimizer, losses and other Params.
    """

    def __init__(self, job: TrainingJob, spec: bytes) -> None:
        params: dict[str, Any] = cloudpickle.loads(spec)
        self._job, self._params = job, params
        self.metrics: list[Any] = params["metrics"]
        if job.seeded:
            torch.manual_seed(job.seed)
        self._device = torch.device("cpu")
        if job.use_gpu and torch.cuda.is_available():
            number = hvd.local_rank() % torch.cuda.device_count()
            torch.cuda.set_device(number)
            self._device = torch.device("cuda", number)
        self._model: torch.nn.Module = params["model"].to(self._device)
        plain = bind_optimizer(params["optimizer"], self._model)
        plain.load_state_dict(scale_learning_rate(plain.state_dict(), hvd.size()))
        compression = params["gradient_compression"]
        self._optimizer = hvd.DistributedOptimizer(
            plain,
            named_parameters=self._model.named_parameters(),
            backward_passes_per_step=params["backward_passes_per_step"],
            **({"compression": compression} if compression else {}),
        )
        self._losses: list[Loss] = params["loss"]
        if params["loss_constructors"]:
            self._losses = [make() for make in params["loss_constructors"]]
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        self._minibatch = params["train_minibatch_fn"] or self._minibatch_step
        self._passes = 0

    def train_step(self, batch: Batch) -> list[float]:
        self._model.train()

        def loss(
            outputs: Tensors, labels: Tensors, weights: torch.Tensor | None = None
        ) -> torch.Tensor:
            return self._loss(outputs, labels, weights) * batch.share

        inputs, labels, weights = self._to_tensors(batch)
        outputs, value = self._minibatch(
            self._model,
            self._optimizer,
            self._match_labels,
            loss,
            inputs,
            labels,
            weights,
        )
        mean = float(value.detach()) / batch.share if batch.rows else 0.0
        return [mean, *self._metrics(*self._match_labels(outputs, labels))]

    def validation_step(self, batch: Batch) -> list[float]:
        self._model.eval()
        inputs, labels, weights = self._to_tensors(batch)
        with torch.no_grad():
            outputs, labels = self._match_labels(self._model(*inputs), labels)
            mean = float(self._loss(outputs, labels, weights))
        return [mean, *self._metrics(outputs, labels)]

    def dumps(self, history: History) -> bytes:
        """Returns a checkpoint, with the learning rate for one rank."""
        optimizer = _on_cpu(self._optimizer.state_dict())
        state = {
            "model": _on_cpu(self._model.state_dict()),
            "optimizer": scale_learning_rate(optimizer, 1 / hvd.size()),
            "history": history,
        }
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue()

    def loads(self, checkpoint: bytes) -> History:
        state = load_checkpoint(checkpoint)
        self._model.load_state_dict(state["model"])
        optimizer = scale_learning_rate(state["optimizer"], hvd.size())
        self._optimizer.load_state_dict(optimizer)
        history: History = state["history"]
        return history

    def _minibatch_step(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        transform_outputs: Callable[..., tuple[Tensors, Tensors]],
        loss_fn: Loss,
        inputs: Tensors,
        labels: Tensors,
        weights: torch.Tensor | None,
    ) -> tuple[Tensors, torch.Tensor]:
        """Makes a step; the default of the user's `train_minibatch_fn`."""
        every = self._params["backward_passes_per_step"]
        if self._passes % every == 0:
            optimizer.zero_grad()
        self._passes += 1
        outputs, labels = transform_outputs(model(*inputs), labels)
        loss: Any = loss_fn(outputs, labels, weights)
        loss.backward()
        if self._passes % every == 0:
            optimizer.step()
        return outputs, loss

    def _to_tensors(
        self, batch: Batch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        columns, job = batch.columns, self._job
        shapes = self._params["input_shapes"] or [None] * len(job.features)
        inputs = [
            to_tensor(columns[name], shape).to(self._device)
            for name, shape in zip(job.features, shapes, strict=True)
        ]
        labels = [to_tensor(columns[name]).to(self._device) for name in job.labels]
        weights = None
        if job.weight is not None:
            weights = to_tensor(columns[job.weight]).to(self._device)
        return inputs, labels, weights

    def _match_labels(
        self, outputs: Tensors | torch.Tensor, labels: Tensors
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """Returns the outputs as a list, and the labels reshaped to fit them.

        Labels have the shapes of `label_shapes`, or else of their outputs.
        """
        found: Any = outputs if isinstance(outputs, list | tuple) else [outputs]
        shapes = self._params["label_shapes"]
        if shapes:
            pairs = zip(labels, shapes, strict=True)
            return found, [x.reshape(batch_shape(shape)) for x, shape in pairs]
        return found, [
            x.reshape(y.shape) if x.numel() == y.numel() else x
            for x, y in zip(labels, found, strict=True)
        ]

    def _loss(
        self, outputs: Tensors, labels: Tensors, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the weighted sum of all losses, each a mean over the rows."""
        total: Any = 0.0
        for output, label, loss, weight in zip(
            outputs, labels, self._losses, self._params["loss_weights"], strict=True
        ):
            if weights is None:
                total = total + weight * loss(output, label).mean()
                continue
            rows = _row_losses(loss, output, label)
            by_row = rows.reshape(len(rows), -1).mean(1) if rows.ndim > 1 else rows
            total = total + weight * (by_row * weights).mean()
        result: torch.Tensor = total
        return result

    def _metrics(self, outputs: Tensors, labels: Tensors) -> list[float]:
        found = []
        with torch.no_grad():
            for group in self.metrics:
                functions = group * len(labels) if len(group) == 1 else group
                for metric, output, label in zip(
                    functions, outputs, labels, strict=True
                ):
                    value = metric(output, label)
                    found.append(float(torch.as_tensor(value).float().mean()))
        return found


def _row_losses(loss: Loss, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    if isinstance(loss, torch.nn.Module):
        module: Any = copy.copy(loss)
        module.reduction = "none"
        losses: torch.Tensor = module(output, label)
        return losses
    return loss(output, label, reduction="none")


def bind_optimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> torch.optim.Optimizer:
    """Returns `optimizer`, or a copy of it with the model's parameters."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if own <= {id(parameter) for parameter in model.parameters()}:
        return optimizer
    make: Any = type(optimizer)
    found: torch.optim.Optimizer = make(model.parameters(), lr=1)
    found.load_state_dict(optimizer.state_dict())
    return found


def scale_learning_rate(state: dict[str, Any], factor: float) -> dict[str, Any]:
    """Returns an optimizer's state with scaled learning rates."""
    groups = [{**g, "lr": g["lr"] * factor} for g in state["param_groups"]]
    return {**state, "param_groups": groups}


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(x) for key, x in value.items()}
    return [_on_cpu(x) for x in value] if isinstance(value, list) else value


def load_checkpoint(checkpoint: bytes) -> dict[str, Any]:
    """Returns the states of model and optimizer, and the history.

    Loading runs no code of the checkpoint.
    """
    state: dict[str, Any] = torch.load(
        io.BytesIO(checkpoint), map_location="cpu", weights_only=True
    )
    return state


def to_tensor(values: Array, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Converts rows to float32, and reshapes each row if `shape` is given."""
    found = torch.from_numpy(np.array(values, np.float32))
    return found if shape is None else found.reshape(batch_shape(shape))


def predictor(
    model: bytes, input_shapes: Shapes
) -> Callable[[Sequence[Array]], list[Array]]:
    """Makes a function that computes the outputs of a pickled model from columns."""
    loaded = cloudpickle.loads(model).eval()

    def predict(columns: Sequence[Array]) -> list[Array]:
        shapes: Sequence[Sequence[int] | None] = input_shapes or [None] * len(columns)
        pairs = zip(columns, shapes, strict=True)
        with torch.no_grad():
            outputs = loaded(*(to_tensor(column, shape) for column, shape in pairs))
        found = outputs if isinstance(outputs, list | tuple) else [outputs]
        return [output.numpy() for output in found]

    return predict
