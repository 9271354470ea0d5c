"""Trains a LightningModule in the ranks of an estimator, by Lightning's Trainer."""

from __future__ import annotations

import importlib
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import torch

from ringjax import runtime
from ringjax.spark.common.parquet_rows import Batch
from ringjax.spark.common.training_loop import (
    History,
    TrainingJob,
    batch_shape,
    ringjax_initialized,
)
from ringjax.spark.trainers.torch import load_checkpoint

Spec: TypeAlias = dict[str, Any]
"""The model and Params of an estimator, see `TorchEstimator._spec`."""

Tensors: TypeAlias = dict[str, torch.Tensor]
"""A batch: a tensor for each column."""


def train(job: TrainingJob, data: bytes) -> tuple[History, bytes] | None:
    """Trains as `training_loop.train` does, with the loop of Trainer.

    Rank 0 returns the history and the last checkpoint, other ranks return None.
    """
    spec: Spec = cloudpickle.loads(data)
    # After the model, which may be of pytorch_lightning: ringjax.lightning follows.
    adapter: Any = importlib.import_module("ringjax.lightning.strategy")
    with ringjax_initialized(), job.store.get_local_output_dir_fn(job.run_id)() as path:
        if job.seeded:
            torch.manual_seed(job.seed)
        return _fit(adapter, job, spec, path)


def _fit(
    adapter: Any, job: TrainingJob, spec: Spec, path: str
) -> tuple[History, bytes] | None:
    state = load_checkpoint(job.checkpoint) if job.checkpoint else {}
    history: History = state.get("history", [])
    done, resumed = len(history), None
    if state:
        resumed = os.path.join(path, "resumed.ckpt")
        with open(resumed, "wb") as file:
            file.write(state["trainer"].numpy().tobytes())
    model = spec["model"]
    rows = _LightningRows(job, spec["input_shapes"], done)
    keeper = _keeper(adapter, job, history, os.path.join(path, "last.ckpt"))
    best = [c for c in spec["callbacks"] if hasattr(c, "best_model_path")]
    for callback in best:
        callback.dirpath = path
    on_gpu = job.use_gpu and torch.cuda.is_available()
    trainer = adapter.lightning_pytorch.Trainer(
        **{
            "strategy": _strategy(adapter, rows, spec),
            "accelerator": "gpu" if on_gpu else "cpu",
            "max_epochs": max(job.epochs, done + job.epochs * (done >= job.epochs)),
            "callbacks": [*spec["callbacks"], keeper],
            "default_root_dir": path,
            "num_sanity_val_steps": 0,
            "enable_checkpointing": bool(best),
            "enable_progress_bar": job.verbose > 1,
            "enable_model_summary": False,
            **spec["trainer"],
        }
    )
    validation = _ValidationRows(job, spec["input_shapes"]) if job.val_rows else None
    trainer.fit(model, rows, validation, ckpt_path=resumed)
    if runtime.rank() != 0:
        return None
    if best and best[0].best_model_path:
        found = trainer.strategy.load_checkpoint(best[0].best_model_path)
        keeper.save(found["state_dict"])
    return history, keeper.checkpoint


class _LightningRows:
    """The training batches of this rank; each iteration is the next epoch.

    Attributes:
        shares: the factors of this rank's means in this epoch, see `Batch.share`.
    """

    def __init__(self, job: TrainingJob, shapes: Any, first_epoch: int) -> None:
        self._job, self._shapes = job, shapes
        self._stream = job.batches(first_epoch)
        self.shares: list[float] = []

    def __len__(self) -> int:
        return self._job.epoch_steps

    def __iter__(self) -> Iterator[Tensors]:
        self.shares = []
        for batch in itertools.islice(self._stream, len(self)):
            self.shares.append(batch.share)
            yield _to_tensors(self._job, self._shapes, batch)


class _ValidationRows:
    """The validation batches of this rank.

    A rank without rows in the last step leaves it out. Its first batch is a placeholder
    if it has no rows at all, so that all ranks log the same metrics.
    """

    def __init__(self, job: TrainingJob, shapes: Any) -> None:
        self._job, self._shapes = job, shapes

    def __iter__(self) -> Iterator[Tensors]:
        for number, batch in enumerate(self._job.validation_batches()):
            if batch.rows or not number:
                yield _to_tensors(self._job, self._shapes, batch)


def _to_tensors(
    job: TrainingJob, shapes: Sequence[Sequence[int]] | None, batch: Batch
) -> Tensors:
    found = {}
    for name in [*job.features, *job.labels]:
        values = np.array(batch.columns[name])
        floats = np.issubdtype(values.dtype, np.floating)
        found[name] = torch.from_numpy(values.astype(np.float32) if floats else values)
    for name, shape in zip(job.features, shapes or (), strict=bool(shapes)):
        found[name] = found[name].reshape(batch_shape(shape))
    return found


def _strategy(adapter: Any, rows: _LightningRows, spec: Spec) -> Any:
    """Returns a strategy with the mean over the rows of all ranks in each step."""

    class WeightedStrategy(adapter.RingjaxStrategy):
        def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
            if spec["terminate_on_nan"] and not bool(closure_loss.isfinite().all()):
                raise ValueError(f"rank {runtime.rank()}: the loss is {closure_loss}")
            number = self.lightning_module.trainer.fit_loop.batch_idx
            loss = closure_loss * rows.shares[number]
            return super().backward(loss, *args, **kwargs)

    compression = spec["gradient_compression"]
    return WeightedStrategy(**({"compression": compression} if compression else {}))


def _keeper(adapter: Any, job: TrainingJob, history: History, file: str) -> Any:
    """Makes a callback that keeps the history, and saves a checkpoint each epoch."""

    class CheckpointKeeper(adapter.lightning_pytorch.Callback):
        def __init__(self) -> None:
            self.checkpoint = b""

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
            history.append({"epoch": trainer.current_epoch, **metrics})
            trainer.save_checkpoint(file)
            if trainer.global_rank == 0:
                self.save({k: v.cpu() for k, v in module.state_dict().items()})
                if job.verbose:
                    print(history[-1])

        def save(self, model: dict[str, torch.Tensor]) -> None:
            with open(file, "rb") as saved:
                trainer = torch.frombuffer(bytearray(saved.read()), dtype=torch.uint8)
            state = {"model": model, "trainer": trainer, "history": history}
            buffer = io.BytesIO()
            torch.save(state, buffer)
            self.checkpoint = buffer.getvalue()
            job.save(self.checkpoint)

    return CheckpointKeeper()
