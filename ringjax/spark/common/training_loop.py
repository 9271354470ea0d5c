"""The training loop of an estimator's rank: steps, means, checkpoints and validation.

Keras has a loop of its own and does not use this loop. Nothing of Spark is imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from ringjax import eager, runtime
from ringjax.ops import ReduceOp
from ringjax.spark.common.parquet_rows import Batch, Columns, ParquetRows
from ringjax.spark.common.store import FilesystemStore

History: TypeAlias = list[dict[str, Any]]


@dataclass
class TrainingJob:
    """The arguments with which a rank trains, without the model.

    Attributes:
        features, labels, weight: the names of the columns.
        batch_size, val_batch_size: rows of one step on one rank.
        steps, val_steps: the number of steps of an epoch; None means all rows.
        seed: the seed of the row order and of the framework.
        seeded: whether the user has chosen the seed.
        buffer: the number of rows that are shuffled together.
        transformation: changes the columns of a batch.
        verbose: whether rank 0 prints the results of each epoch.
        checkpoint: the checkpoint from which the run continues.
    """

    run_id: str
    store: FilesystemStore
    rows: ParquetRows
    val_rows: ParquetRows | None
    features: list[str]
    labels: list[str]
    weight: str | None
    batch_size: int
    val_batch_size: int
    steps: int | None
    val_steps: int | None
    epochs: int
    seed: int
    seeded: bool
    shuffle: bool
    buffer: int | None
    transformation: Callable[[Columns], Columns] | None
    use_gpu: bool
    verbose: int
    checkpoint: bytes | None = None

    def batches(self, first_epoch: int = 0) -> Iterator[Batch]:
        """Yields this rank's training batches, epoch after epoch, without an end."""
        for epoch in itertools.count(first_epoch):
            batches = self.rows.batches(
                runtime.rank(),
                runtime.size(),
                self.batch_size,
                seed=self.seed if self.shuffle else None,
                epoch=epoch,
                buffer=self.buffer,
            )
            yield from map(self._transform, batches)

    def validation_batches(self) -> Iterator[Batch]:
        """Returns this rank's batches for one validation."""
        assert self.val_rows is not None
        batches = self.val_rows.batches(
            runtime.rank(), runtime.size(), self.val_batch_size
        )
        return itertools.islice(map(self._transform, batches), self.val_steps)

    def _transform(self, batch: Batch) -> Batch:
        if self.transformation is None:
            return batch
        return replace(batch, columns=self.transformation(batch.columns))

    @property
    def epoch_steps(self) -> int:
        """The number of steps of an epoch, the same on all ranks."""
        return self.steps or self.rows.steps(runtime.size(), self.batch_size)

    def save(self, checkpoint: bytes) -> None:
        """Writes the checkpoint of the run, if the store keeps checkpoints."""
        folder = self.store.get_checkpoint_path(self.run_id)
        if folder is not None:
            name = self.store.get_checkpoint_filename()
            self.store.write(f"{folder}/{name}", checkpoint)


class ModelTrainer(Protocol):
    """The interface through which `train` trains a model of any framework.

    Attributes:
        metrics: groups of metrics. A group has one function for all labels, or one for
            each label.
    """

    metrics: list[Any]

    def train_step(self, batch: Batch) -> Sequence[float]:
        """Makes a step; returns the means of loss and metrics over the rows."""

    def validation_step(self, batch: Batch) -> Sequence[float]:
        """Returns the means of loss and metrics over the rows, without a step."""

    def dumps(self, history: History) -> bytes:
        """Returns a checkpoint of the model, the optimizer and the history."""

    def loads(self, checkpoint: bytes) -> History:
        """Restores a checkpoint, and returns the history in the checkpoint."""


def train(
    make: Callable[..., ModelTrainer], job: TrainingJob, *args: Any
) -> tuple[History, bytes] | None:
    """Trains a model with the ModelTrainer that `make(job, *args)` returns.

    A run with a checkpoint continues until it has `job.epochs` epochs. A run that has
    as many epochs already continues for `job.epochs` more epochs. Rank 0 returns the
    history and the last checkpoint, other ranks return None.
    """
    with ringjax_initialized():
        trainer = make(job, *args)
        history = trainer.loads(job.checkpoint) if job.checkpoint else []
        done = len(history)
        left = job.epochs - done if done < job.epochs else job.epochs
        stream = job.batches(done)
        checkpoint = b""
        for epoch in range(done, done + left):
            steps = itertools.islice(stream, job.epoch_steps)
            means = _global_means(trainer.train_step, steps)
            named = group_metrics(means, job.labels, trainer.metrics)
            entry = {"epoch": epoch, "train": named}
            if job.val_rows is not None:
                validation = job.validation_batches()
                means = _global_means(trainer.validation_step, validation)
                named = group_metrics(means, job.labels, trainer.metrics)
                entry["validation"] = named
            history.append(entry)
            if runtime.rank() == 0:
                checkpoint = trainer.dumps(history)
                job.save(checkpoint)
                if job.verbose:
                    print(entry)
        return (history, checkpoint) if runtime.rank() == 0 else None


def group_metrics(
    means: Sequence[float], labels: Sequence[str], groups: Sequence[Any]
) -> dict[str, Any]:
    """Names the means of an epoch as Horovod's history does.

    `means` are the loss, and then the metrics of each group for each label.

    Example:
        >>> group_metrics([0.5, 0.9], ["y"], [["accuracy"]])
        {'loss': 0.5, 'all_metrics': [{'group_0_y': 0.9}]}
    """
    loss, *rest = means
    left = iter(rest)
    metrics = [
        {f"group_{n}_{label}": next(left) for label in labels}
        for n, _ in enumerate(groups)
    ]
    return {"loss": loss, "all_metrics": metrics}


def batch_shape(shape: Sequence[int]) -> list[int]:
    """Returns the shape of a batch from the shape of a row, which may begin with -1.

    Example:
        >>> batch_shape([2]), batch_shape([-1, 2])
        ([-1, 2], [-1, 2])
    """
    return [-1, *(shape[1:] if shape and shape[0] == -1 else shape)]


@contextmanager
def ringjax_initialized() -> Iterator[None]:
    """Initializes ringjax for a `with` block, unless it is initialized already."""
    before = runtime.is_initialized()
    runtime.init()
    try:
        yield
    finally:
        if not before:
            runtime.shutdown()


def _global_means(
    step: Callable[[Batch], Sequence[float]], batches: Iterator[Batch]
) -> list[float]:
    """Runs steps; returns the means of the steps' results over all ranks' rows."""
    sums = sum(
        np.array([*step(batch), 1.0], np.float64) * batch.rows for batch in batches
    )
    total = eager.allreduce(sums, ReduceOp.Sum, name="ringjax.spark.means")
    means: list[float] = (total[:-1] / total[-1]).tolist()
    return means
