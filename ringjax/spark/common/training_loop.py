"""The epochs of an estimator's rank: steps, averages, a checkpoint, validation.

Not for Keras, which has a loop of its own. Nothing of Spark is imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ringjax import eager, runtime
from ringjax.ops import ReduceOp
from ringjax.spark.common.parquet_rows import Batch, Columns, ParquetRows

History = list[dict[str, Any]]
Sums = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class TrainingJob:
    """What a rank needs to know, beside the model.

    Attributes:
        run_id: of the run.
        store: where its checkpoint goes.
        rows, val_rows: what is trained on, and what is validated on.
        features, labels, weight: the columns.
        batch_size, val_batch_size: rows of a rank's step.
        steps, val_steps: of an epoch; None: all rows.
        epochs: passes over the data.
        seed: of the order of rows, and of the framework.
        seeded: whether somebody has chosen it.
        shuffle: whether the order changes.
        buffer: rows among which is shuffled.
        transformation: changes the columns of a batch.
        use_gpu: whether this is to be had.
        verbose: whether rank 0 tells of epochs.
        checkpoint: where this run goes on.
    """

    run_id: str
    store: Any
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

    def stream(self, first: int = 0) -> Iterator[Batch]:
        """This rank's batches for training, from that epoch on, without an end."""
        for epoch in itertools.count(first):
            yield from map(
                self.transformed,
                self.rows.batches(
                    *(runtime.rank(), runtime.size(), self.batch_size),
                    seed=self.seed if self.shuffle else None,
                    epoch=epoch,
                    buffer=self.buffer,
                ),
            )

    def validation(self) -> Iterator[Batch]:
        """This rank's batches for validation."""
        assert self.val_rows is not None
        who = runtime.rank(), runtime.size(), self.val_batch_size
        batches = map(self.transformed, self.val_rows.batches(*who))
        return itertools.islice(batches, self.val_steps)

    def transformed(self, batch: Batch) -> Batch:
        """With the program's own changes to the columns."""
        if self.transformation is None:
            return batch
        columns = self.transformation(batch.columns)
        return Batch(columns, batch.rows, batch.share)

    @property
    def epoch_steps(self) -> int:
        """The steps of an epoch."""
        return self.steps or self.rows.steps(runtime.size(), self.batch_size)

    def save(self, checkpoint: bytes) -> None:
        """Keeps a checkpoint of the run, if the store keeps any."""
        folder = self.store.get_checkpoint_path(self.run_id)
        if folder is not None:
            name = self.store.get_checkpoint_filename()
            self.store.write(f"{folder}/{name}", checkpoint)


class ModelTrainer(Protocol):
    """A model in training, of whatever framework."""

    def train_step(self, batch: Batch) -> Sequence[float]:
        """A step; the means of the loss and of all metrics over its rows."""

    def validation_step(self, batch: Batch) -> Sequence[float]:
        """The same means without a step."""

    def name_means(self, means: Sequence[float]) -> dict[str, Any]:
        """Them with names, for the history."""

    def dumps(self, history: History) -> bytes:
        """A checkpoint."""

    def loads(self, checkpoint: bytes) -> History:
        """Goes on from a checkpoint; its history."""


def train(
    make: Callable[..., ModelTrainer], job: TrainingJob, *args: Any
) -> tuple[Any, ...] | None:
    """Trains the learner `make(job, *args)`.

    A run whose checkpoint has fewer epochs than are asked for makes the rest; one that
    has them all, so many more.

    Returns:
        On rank 0 the history and the last checkpoint.
    """
    with ringjax_initialized():
        trainer = make(job, *args)
        history = trainer.loads(job.checkpoint) if job.checkpoint else []
        done = len(history)
        left = job.epochs - done if done < job.epochs else job.epochs
        stream = job.stream(done)
        checkpoint = b""
        for epoch in range(done, done + left):
            batches = itertools.islice(stream, job.epoch_steps)
            entry: dict[str, Any] = {"epoch": epoch}
            entry["train"] = trainer.name_means(
                _global_means(map(_times_rows(trainer.train_step), batches))
            )
            if job.val_rows is not None:
                validated = map(_times_rows(trainer.validation_step), job.validation())
                entry["validation"] = trainer.name_means(_global_means(validated))
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
    """The loss, and each group's metrics by label, as Horovod's history has them.

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
    """The shape of an array of rows, whether that of a row begins with -1 or not.

    Example:
        >>> batch_shape([2]), batch_shape([-1, 2])
        ([-1, 2], [-1, 2])
    """
    return [-1, *(shape[1:] if shape and shape[0] == -1 else shape)]


class ringjax_initialized:  # noqa: N801  (used like a function)
    """ringjax, for as long as a with statement, unless it is there already."""

    def __enter__(self) -> None:
        self._started_here = not runtime.is_initialized()
        runtime.init()

    def __exit__(self, *_: object) -> None:
        if self._started_here:
            runtime.shutdown()


def _times_rows(step: Callable[[Batch], Sequence[float]]) -> Callable[[Batch], Sums]:
    """What a step says, times its rows, and those."""

    def counted(batch: Batch) -> Sums:
        return np.array([*step(batch), 1.0], np.float64) * batch.rows

    return counted


def _global_means(sums: Iterator[Sums]) -> list[float]:
    """Over the rows of all ranks."""
    total = eager.allreduce(sum(sums), ReduceOp.Sum, name="ringjax.spark.means")
    means: list[float] = (total[:-1] / total[-1]).tolist()
    return means
