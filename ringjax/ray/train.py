"""A backend for Ray Train: a trainer starts workers, and ringjax joins them to a job.

In an elastic job, each worker is a replica group of Ray. If a worker is lost, Ray
starts a replacement, and the other workers keep their processes and their state. The
backend needs version 2 of Ray Train.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ray.train
from ray.train.backend import Backend, BackendConfig

from ringjax import runtime
from ringjax.run.engine_job import EngineJob
from ringjax.runtime import reused_process

# A worker group of Ray Train: all workers of a run, or one replacement.
WorkerGroup: TypeAlias = Any
TrainWorker: TypeAlias = Any

log = logging.getLogger("ringjax.ray")


@dataclass
class RingConfig(BackendConfig):
    """The `backend_config` of a `DataParallelTrainer` whose workers form a ringjax job.

    The training function calls `ringjax.init()`. If it uses `ringjax.elastic.run`, and
    the trainer has a `FailureConfig(max_failures=...)`, a lost worker is replaced
    without a restart of the other workers.

    Args:
        elastic: whether workers may be lost and replaced; otherwise a loss ends the
            training function on all workers, and Ray starts it again.
        min_workers: the number of workers below which the remaining workers wait for a
            replacement.
        env: environment variables for the workers.

    Example:
        >>> DataParallelTrainer(
        ...     train, backend_config=RingConfig(),
        ...     scaling_config=ScalingConfig(num_workers=4),
        ...     run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
        ... ).fit()  # doctest: +SKIP
    """

    elastic: bool = True
    min_workers: int = 1
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[Backend]:
        """The class of the backend, of which Ray makes an object."""
        return _ElasticTrainBackend if self.elastic else _StaticTrainBackend


class _StaticTrainBackend(Backend):
    """Forms a static job. The backend object lives in Ray Train's controller."""

    # All workers of a node see all GPUs of the node, and each worker selects a GPU by
    # its local rank.
    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._job: EngineJob | None = None

    def on_start(self, worker_group: WorkerGroup, backend_config: RingConfig) -> None:
        """Forms the job; Ray calls it after all workers have started."""
        self._close()
        config = backend_config
        nodes = [worker.metadata.node_id for worker in worker_group.get_workers()]
        min_size = min(config.min_workers, len(nodes)) if config.elastic else None
        self._job = EngineJob(
            len(nodes), min_size=min_size, env=config.env, note=log.info
        )
        for index, ticket in enumerate(self._job.tickets(nodes)):
            worker_group.execute_single(index, reused_process.set_environment, ticket)

    def on_shutdown(
        self, worker_group: WorkerGroup, backend_config: RingConfig
    ) -> None:
        """Closes the job; Ray calls it before it ends the workers."""
        self._close()

    def _close(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()


class _ElasticTrainBackend(_StaticTrainBackend):
    has_replica_groups = True
    # A replacement sees only its own GPU, so each worker sees only its own GPU.
    share_cuda_visible_devices = False

    def __init__(self) -> None:
        super().__init__()
        self._numbers: Iterator[int] = itertools.count()
        # The worker ids in the job, by Ray's ids of the actors.
        self._workers: dict[str, int] = {}

    def on_start(self, worker_group: WorkerGroup, backend_config: RingConfig) -> None:
        """Forms the job, or adds a replacement; Ray calls it after workers start."""
        if _is_replacement(worker_group):
            if self._job is None:
                raise RuntimeError("Ray replaces a worker of a job that has ended")
            for index, worker in enumerate(worker_group.get_workers()):
                number = next(self._numbers)
                self._workers[_id(worker)] = number
                ticket = self._job.ticket(number, worker.metadata.node_id)
                worker_group.execute_single(
                    index, reused_process.set_environment, ticket
                )
            return
        super().on_start(worker_group, backend_config)
        workers = worker_group.get_workers()
        self._workers = {_id(worker): n for n, worker in enumerate(workers)}
        self._numbers = itertools.count(len(workers))

    def on_shutdown(
        self, worker_group: WorkerGroup, backend_config: RingConfig
    ) -> None:
        """Reports a lost worker, or closes the job; Ray calls it in both cases."""
        if not _is_replacement(worker_group):
            self._close()
            return
        for worker in worker_group.get_workers():
            number = self._workers.pop(_id(worker), None)
            if number is not None and self._job is not None:
                # Ray calls no method of a backend between start and shutdown, so the
                # events of the job have not been processed since the start.
                self._job.poll()
                self._job.lost(number, "Ray Train replaces it")


def _is_replacement(group: WorkerGroup) -> bool:
    return not hasattr(group, "get_replica_groups")


def _id(worker: TrainWorker) -> str:
    return str(worker.actor._actor_id.hex())


def report(metrics: Mapping[str, Any], **options: Any) -> bool:
    """Calls `ray.train.report`, unless a worker is being replaced.

    All ranks call this function at the same step. Ray's function waits for all workers.
    A worker that is being replaced reports nothing before the next commit of the other
    workers, so the other workers would wait for ever. They report nothing in this case.

    Args:
        metrics: the metrics to report.
        options: further arguments of `ray.train.report`, such as `checkpoint`.

    Returns:
        Whether the metrics were reported.
    """
    if runtime.size() < ray.train.get_context().get_world_size():
        return False
    ray.train.report(dict(metrics), **options)
    return True
