"""Functions by which a program says what its time is for, and how far it is."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Literal

from ringjax import runtime, stderr
from ringjax.config import kubeflow_variables
from ringjax.monitor.time_report import Progress
from ringjax.monitor.trainjob_status import TrainJobStatus, runs_in_trainjob
from ringjax.world.time_spent import spent


def time_for(
    part: Literal["checkpoints", "compile", "other"],
) -> contextlib.AbstractContextManager[None]:
    """Counts a block of the program as time that makes no progress.

    The goodput line of ringrun, `ringjax top` and the metrics show the share of these
    blocks. Blocks inside of a block do not count again. Checkpoints of
    `ringjax.elastic.Checkpointer` and of orbax count without this function, and so do
    compilations by JAX. PyTorch and TensorFlow have no public way to learn of theirs.

    Use it on the thread that trains: what another thread does takes no time of it.

    Args:
        part: "checkpoints"; "compile", for example around the first step of a model
            of `torch.compile`; or "other" for anything else, such as an evaluation.

    Raises:
        ValueError: `part` is none of the three.

    Example:
        >>> import ringjax
        >>> with ringjax.time_for("checkpoints"):
        ...     pass  # write a checkpoint
    """
    if part not in ("checkpoints", "compile", "other"):
        raise ValueError(
            f"ringjax.time_for: part={part!r}: expected "
            '"checkpoints", "compile" or "other"'
        )
    return spent.on(part)


def progress(step: int, total: int, **metrics: float) -> None:
    """Says how far the training is, for the status of a Kubeflow TrainJob.

    Call it after any step, on all ranks or on rank 0. It stores the numbers, and
    nothing else happens outside of a TrainJob (KEP-2779). In a TrainJob, ringrun
    reports the percentage, the remaining time and the metrics to Kubeflow, and in a job
    without ringrun a thread of rank 0 does.

    Args:
        step: the number of steps that are done.
        total: the number of steps of the whole training, at least 1.
        **metrics: values such as ``loss=0.2``. A JAX array is read, which waits for it.

    Raises:
        ValueError: `step` is negative, or `total` is below 1.

    Example:
        >>> import ringjax
        >>> ringjax.progress(step=30, total=100, loss=0.2)
    """
    if step < 0 or total < 1:
        raise ValueError(
            f"ringjax.progress: step={step}, total={total}: expected step >= 0 and "
            "total >= 1"
        )
    values = {name: float(value) for name, value in metrics.items()}
    spent.progress = Progress(int(step), int(total), values)
    if runtime.is_initialized() and (status := _status_of_rank_0()) is not None:
        status.update(spent.progress, time.monotonic())


@functools.cache
def _status_of_rank_0() -> TrainJobStatus | None:
    """Returns the sender of a TrainJob without ringrun on rank 0, otherwise None."""
    env = kubeflow_variables()
    if not runs_in_trainjob(env) or runtime.config().monitor or runtime.rank():
        return None
    status = TrainJobStatus(env, lambda text: stderr.line(f"[ringjax] warning: {text}"))
    runtime.on_shutdown(status.close)
    return status
