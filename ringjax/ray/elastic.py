"""ElasticRayExecutor: runs a function in an elastic job on a cluster of Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringjax.ray.adapter import get_setting
from ringjax.ray.discovery import RayHostDiscovery, TestDiscovery
from ringjax.ray.executor import MiniSettings, RayExecutor
from ringjax.ray.ray_types import Callbacks, Result

__all__ = ["ElasticRayExecutor", "RayHostDiscovery", "TestDiscovery"]


@dataclass
class _Settings(MiniSettings):
    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    cooldown_range: Sequence[float] | None = None


class ElasticRayExecutor:
    """Runs a function in an elastic job; Horovod's class, with its arguments.

    Args:
        settings: the result of `create_settings`.
        use_gpu, cpus_per_slot, gpus_per_slot: the resources of a worker.
        env_vars: environment variables for the workers.
        override_discovery: whether Ray decides where workers start; otherwise the
            `discovery` of the settings does.

    Example:
        >>> settings = ElasticRayExecutor.create_settings(min_num_proc=2)
        >>> executor = ElasticRayExecutor(settings, use_gpu=True)
        >>> executor.start()  # doctest: +SKIP
        >>> executor.run(train)  # doctest: +SKIP
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Sequence[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> MiniSettings:
        """Returns the settings of a job.

        `min_np` and `max_np` are former names of `min_num_proc` and `max_num_proc`.
        Further settings become attributes without an effect.
        """
        settings = _Settings(
            nics=nics,
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            elastic=True,
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            cooldown_range=cooldown_range,
        )
        vars(settings).update(kwargs)
        return settings

    def __init__(
        self,
        settings: Any,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        self.settings, self.env_vars = settings, dict(env_vars or {})
        self._executor = RayExecutor(
            settings,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            reset_limit=settings.reset_limit,
            cooldown_range=get_setting(settings, "cooldown_range"),
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
        )

    def start(self) -> None:
        """Connects to Ray; `run` starts the workers."""
        self._executor.start(extra_env_vars=self.env_vars)

    def run(
        self, worker_fn: Callable[[], Any], callbacks: Callbacks | None = None
    ) -> list[Result]:
        """Calls the function on all workers.

        Args:
            worker_fn: a function that uses `ringjax.elastic.run`.
            callbacks: functions that receive the messages of `ray_logger.log`.

        Returns:
            The results of the members at the end of the job, by rank.

        Raises:
            LaunchError: the job has failed.
            TimeoutError: the cluster has no room for the smallest number of workers.
        """
        return self._executor.run(worker_fn, callbacks=callbacks)
