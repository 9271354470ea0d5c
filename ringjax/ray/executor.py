"""RayExecutor, Horovod's class: actors that stay and run several functions in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from ringjax.ray.adapter import Executable, settings_environment
from ringjax.ray.discovery import HostDiscovery
from ringjax.ray.elastic_v2 import ElasticParams
from ringjax.ray.jobs import is_client
from ringjax.ray.ray_logger import DriverLogger
from ringjax.ray.ray_types import Callbacks, ObjectRef, Result, Task
from ringjax.ray.static_jobs import StaticParams
from ringjax.run.environ import own_settings

Function = Callable[..., Any]


@dataclass
class MiniSettings:
    """The settings of a `RayExecutor`. Attributes without a description have no effect.

    Attributes:
        nics: the network interfaces that the workers may use; None means all.
        timeout_s: seconds until all workers must have called `init`.
        placement_group_timeout_s: seconds until the cluster must have room.
        discovery: a `HostDiscovery`, for `override_discovery=False`.
    """

    nics: Sequence[str] | None = None
    verbose: int = 1
    key: object = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False
    discovery: HostDiscovery | None = None


class RayExecutor:
    """Actors that form a job; Horovod's class, with its arguments.

    With `num_workers`, the workers are packed onto few nodes. With `num_hosts`, each of
    that many nodes has `num_workers_per_host` workers. With `min_workers`, the job is
    elastic: `run` starts and ends the actors itself, and no actor stays after it. For a
    client of a cluster (`ray://`), an actor in the cluster does the work.

    Args:
        settings: the result of `create_settings`.
        num_workers: the number of workers.
        num_hosts, num_workers_per_host: the number of workers by nodes.
        cpus_per_worker, use_gpu, gpus_per_worker: the resources of a worker.
        use_current_placement_group: whether the workers start in the placement group of
            this process, if there is one.
        min_workers, max_workers, reset_limit, cooldown_range, elastic_timeout,
        override_discovery: for an elastic job, see `ElasticParams`.

    Attributes:
        adapter: the object that holds `workers`, the actors. For a client the adapter
            is an actor, too.

    Raises:
        ValueError: the arguments do not fit together.

    Example:
        >>> executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)
        >>> executor.start()  # doctest: +SKIP
        >>> executor.run(train)  # doctest: +SKIP
        >>> executor.shutdown()
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | None = None,
    ) -> MiniSettings:
        """Returns the settings, whose attributes the program may change."""
        return MiniSettings(
            nics=nics,
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )

    def __init__(
        self,
        settings: MiniSettings | Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int | None = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if max_workers and (not min_workers or min_workers <= 0):
            raise ValueError("`max_workers` provided without a positive `min_workers`.")
        if min_workers and num_workers:
            raise ValueError("Both `min_workers` and `num_workers` provided.")
        if num_workers and num_hosts:
            raise ValueError("Both `num_workers` and `num_hosts` provided.")
        if num_workers is num_hosts is min_workers is None:
            raise ValueError("Give `num_workers`, `num_hosts` or `min_workers`.")
        resources = cpus_per_worker, use_gpu, gpus_per_worker
        self.params: StaticParams | ElasticParams
        if min_workers is not None:
            self.params = ElasticParams(
                *resources,
                min_workers=min_workers,
                max_workers=max_workers,
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                elastic_timeout=elastic_timeout,
                override_discovery=override_discovery,
            )
        else:
            sizes = num_workers, num_hosts, num_workers_per_host
            self.params = StaticParams(*resources, *sizes, use_current_placement_group)
        self.settings = settings if settings is not None else self.create_settings()
        self.settings.elastic = self.params.elastic
        self.adapter: Any = None  # the Adapter, or for a client the handle of an actor
        self._remote = False

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[object] | None = None,
        executable_kwargs: Mapping[str, object] | None = None,
        extra_env_vars: Mapping[str, object] | None = None,
    ) -> None:
        """Starts the workers; each makes an object of a class.

        Args:
            executable_cls: the class. `execute` calls its function with the object.
            executable_args, executable_kwargs: the arguments of the class.
            extra_env_vars: environment variables for the workers.

        Raises:
            TimeoutError: the cluster has no room for the workers.
            LaunchError: an object could not be made.
        """
        self.shutdown()
        if not ray.is_initialized():
            ray.init()
        adapter: Any = self.params.adapter
        self._remote = is_client()
        # Let the actor run two calls at the same time, so that `shutdown` can end a
        # call that is running.
        if self._remote:
            adapter = ray.remote(num_cpus=0, max_concurrency=2)(adapter).remote
        self.adapter = adapter(self.settings, self.params)
        env = {**own_settings(), **settings_environment(self.settings)}
        env |= {name: str(value) for name, value in (extra_env_vars or {}).items()}
        executable = Executable(
            executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {})
        )
        self._call("start", executable, env)

    def _call(self, method: str, *args: Any) -> Any:
        """Calls a method of the adapter, and waits for its result."""
        bound = self._bind(method)
        if self._remote:
            with DriverLogger(None) as logger:
                return logger.wait_for(bound.remote(*args))
        return bound(*args)

    def _bind(self, method: str) -> Any:
        if self.adapter is None:
            raise ValueError(f"RayExecutor.{method}: call start() first")
        return getattr(self.adapter, method)

    def execute(self, fn: Task, callbacks: Callbacks | None = None) -> list[Result]:
        """Calls `fn(executable)` on all workers, and returns the results by rank.

        Args:
            fn: the function, which receives the object of its worker.
            callbacks: functions that receive the messages of `ray_logger.log`.

        Raises:
            LaunchError: a worker has failed; in an elastic job, the job has failed.
            TimeoutError: the cluster has no room for an elastic job.
        """
        bound = self._bind("execute")
        with DriverLogger(callbacks) as logger:
            if self._remote:
                return list(logger.wait_for(bound.remote(fn, logger.queue)))
            return list(bound(fn, logger.queue, logger.dispatch))

    def run(
        self,
        fn: Function,
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
        callbacks: Callbacks | None = None,
    ) -> list[Result]:
        """Calls `fn(*args, **kwargs)` on all workers; otherwise like `execute`."""
        return self.execute(_bind_arguments(fn, args, kwargs), callbacks)

    def run_remote(
        self,
        fn: Function,
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> list[ObjectRef]:
        """Calls `fn(*args, **kwargs)` on all workers; returns references immediately.

        Raises:
            NotImplementedError: the job is elastic.
        """
        return list(self._call("run_remote", _bind_arguments(fn, args, kwargs)))

    def execute_single(self, fn: Task) -> Result:
        """Calls `fn(executable)` on rank 0, and returns the result.

        Raises:
            NotImplementedError: the job is elastic.
        """
        return self._call("execute_single", fn)

    def shutdown(self) -> None:
        """Ends the workers. A second call does nothing."""
        adapter, self.adapter = self.adapter, None
        if adapter is not None and self._remote:
            with contextlib.suppress(RayError):  # the adapter's node may be lost
                ray.get(adapter.shutdown.remote())
            ray.kill(adapter)
        elif adapter is not None:
            adapter.shutdown()


def _bind_arguments(
    fn: Function, args: Sequence[object] | None, kwargs: Mapping[str, object] | None
) -> Task:
    positional, named = tuple(args or ()), dict(kwargs or {})
    return lambda _: fn(*positional, **named)
