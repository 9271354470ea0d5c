"""A backend for Ray Train: its trainers start the workers, ringjax joins them.

Each worker is a replica group, in Ray's words: when one is lost, Ray puts another one
in its place, and the others keep process and state. Needs Ray Train's second version.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray.train
from ray.train.backend import Backend, BackendConfig

from ringjax import runtime
from ringjax.run.engine_job import EngineJob
from ringjax.runtime import reused_process

log = logging.getLogger("ringjax.ray")


@dataclass
class RingConfig(BackendConfig):
    """The `backend_config` of a `DataParallelTrainer` whose workers are a ringjax job.

    The training function calls `ringjax.init()`. With `ringjax.elastic.run` in it, and
    `FailureConfig(max_failures=...)`, the loss of a worker is repaired without a
    restart of the others.

    Args:
        elastic: whether workers may be lost and replaced; otherwise a loss ends the
            training function everywhere, and Ray begins again.
        min_workers: with fewer the others wait for a replacement.
        env: variables for the workers.

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
        """What Ray calls."""
        return _ElasticTrainBackend if self.elastic else _StaticTrainBackend


class _StaticTrainBackend(Backend):
    """Lives in Ray Train's controller, one for all of its runs."""

    share_cuda_visible_devices = True  # so that the local rank picks a device

    def __init__(self) -> None:
        self._job: EngineJob | None = None

    def on_start(self, worker_group: Any, backend_config: RingConfig) -> None:
        """All workers are there."""
        self._begin(worker_group, backend_config)

    def _begin(self, group: Any, config: RingConfig) -> None:
        self._close()
        nodes = [worker.metadata.node_id for worker in group.get_workers()]
        least = min(config.min_workers, len(nodes)) if config.elastic else None
        self._job = EngineJob(len(nodes), min_size=least, env=config.env, note=log.info)
        for index, ticket in enumerate(self._job.tickets(nodes)):
            group.execute_single(index, reused_process.set_environment, ticket)

    def on_shutdown(self, worker_group: Any, backend_config: RingConfig) -> None:
        """The workers are about to be ended."""
        self._close()

    def _close(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()


class _ElasticTrainBackend(_StaticTrainBackend):
    has_replica_groups = True
    share_cuda_visible_devices = False  # a replacement would see its own alone

    def __init__(self) -> None:
        super().__init__()
        self._numbers: Iterator[int] = itertools.count()
        self._workers: dict[str, int] = {}  # by Ray's id of the actor

    def on_start(self, worker_group: Any, backend_config: RingConfig) -> None:
        """All workers are there, or the replacement of one."""
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
        self._begin(worker_group, backend_config)
        workers = worker_group.get_workers()
        self._workers = {_id(worker): n for n, worker in enumerate(workers)}
        self._numbers = itertools.count(len(workers))

    def on_shutdown(self, worker_group: Any, backend_config: RingConfig) -> None:
        """A worker has been lost, or all are about to be ended."""
        if not _is_replacement(worker_group):
            self._close()
            return
        for worker in worker_group.get_workers():
            number = self._workers.pop(_id(worker), None)
            if number is not None and self._job is not None:
                self._job.poll()  # only now: Ray calls nothing of a backend meanwhile
                self._job.lost(number, "Ray Train replaces it")


def _is_replacement(group: Any) -> bool:
    return not hasattr(group, "get_replica_groups")


def _id(worker: Any) -> str:
    return str(worker.actor._actor_id.hex())


def report(metrics: Mapping[str, Any], **options: Any) -> bool:
    """`ray.train.report`, where workers may be replaced.

    All ranks call it at the same step. Ray's waits for all workers; while one is being
    replaced they would wait for it, and it for their next commit. So then this one does
    nothing.

    Args:
        metrics, options: as Ray's has them: `checkpoint` and others.

    Returns:
        Whether it was reported.
    """
    if runtime.size() < ray.train.get_context().get_world_size():
        return False
    ray.train.report(dict(metrics), **options)
    return True
