"""Horovod's `RayExecutor`: actors that stay, and run one function after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from ringjax.ray import actors
from ringjax.ray.actors import Place
from ringjax.ray.jobs import Call
from ringjax.ray.ray_logger import Callbacks
from ringjax.run.engine_job import EngineJob


@dataclass
class MiniSettings:
    """What `create_settings` returns; those without a word have no effect here.

    Attributes:
        timeout_s: for all workers to call `init`.
        placement_group_timeout_s: for the cluster to have room.
        nics: network interfaces that the workers may use.
        elastic_timeout: for newcomers if too few workers are left.
        min_num_proc, max_num_proc, reset_limit: of an elastic job.
    """

    timeout_s: float = 30
    ssh_identity_file: str | None = None
    ssh_str: str | None = None
    placement_group_timeout_s: float = 100
    nics: Sequence[str] | None = None
    elastic_timeout: float = 600
    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None

    def env(self) -> dict[str, str]:
        """The same as settings of ringjax."""
        found = {
            "RINGJAX_START_TIMEOUT": f"{self.timeout_s:g}",
            "RINGJAX_ELASTIC_TIMEOUT": f"{self.elastic_timeout:g}",
        }
        if self.nics:
            found["RINGJAX_NETWORK_INTERFACES"] = ",".join(sorted(self.nics))
        return found


def resources_of(cpus: float, use_gpu: bool, gpus: float | None) -> dict[str, float]:
    """What a worker needs, in Ray's words.

    Raises:
        ValueError: GPUs are counted but not used.
    """
    if gpus is not None and not use_gpu:
        raise ValueError("gpus_per_worker is set, but use_gpu is False")
    if gpus is not None and gpus <= 0:
        raise ValueError(f"gpus_per_worker={gpus}: expected more than 0")
    found = {"CPU": float(cpus)}
    return found | ({"GPU": float(gpus or 1)} if use_gpu else {})


class RayExecutor:
    """Actors that form a job; Horovod's class, with its arguments.

    With `num_workers` they are packed onto few nodes; `num_hosts` nodes get
    `num_workers_per_host` each. With `min_workers` the job is elastic: then `run`
    starts and ends actors itself, and they do not stay.

    Args:
        settings: from `create_settings`.
        num_workers: how many; in an elastic job, where it may be left out, no more to
            begin with than there is room for.
        num_hosts, num_workers_per_host: the same by nodes.
        cpus_per_worker, use_gpu, gpus_per_worker: what each needs.
        use_current_placement_group: take that in which this process runs, if any.
        min_workers, max_workers, reset_limit, elastic_timeout: of an elastic job.
        cooldown_range, override_discovery: without effect; Ray knows its nodes.

    Raises:
        ValueError: arguments do not fit together.

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
        """The settings, to be changed where one likes."""
        return MiniSettings(
            timeout_s, ssh_identity_file, ssh_str, placement_group_timeout_s, nics
        )

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if num_workers is not None and num_hosts is not None:
            raise ValueError("num_workers and num_hosts: give only one of them")
        if max_workers is not None and min_workers is None:
            raise ValueError("max_workers: only for elastic jobs; give min_workers")
        if num_workers is num_hosts is min_workers is None:
            raise ValueError("give num_workers, num_hosts or min_workers")
        self.settings = settings if settings is not None else MiniSettings()
        self._resources = resources_of(cpus_per_worker, use_gpu, gpus_per_worker)
        self._hosts, self._per_host = num_hosts, num_workers_per_host
        self._size = num_workers or (num_hosts or 0) * num_workers_per_host
        self._use_current = use_current_placement_group
        self._sizes: tuple[int, int] | None = None
        if min_workers is not None:
            most = max_workers or max(self._size, min_workers)
            self._sizes = (min_workers, most)
        self._reset_limit, self._elastic_timeout = reset_limit, elastic_timeout
        self._env: dict[str, str] = {}
        self._executable: tuple[Any, ...] = (None, None, None)
        self._job: EngineJob | None = None
        self._place: Place | None = None
        self.workers: list[Any] = []

    @property
    def adapter(self) -> RayExecutor:
        """Holds `workers`, in Horovod's words."""
        return self

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the workers, and makes an object of a class on each.

        Args:
            executable_cls: the class; `execute` hands the object to its function.
            executable_args, executable_kwargs: what the class is called with.
            extra_env_vars: variables for the workers.

        Raises:
            TimeoutError: the cluster has no room for them.
            LaunchError: an object could not be made.
        """
        self.shutdown()
        if not ray.is_initialized():
            ray.init()
        self._env = {**self.settings.env(), **(extra_env_vars or {})}
        self._executable = (executable_cls, executable_args, executable_kwargs)
        if self._sizes is not None:
            if executable_cls is not None:
                raise ValueError("executable_cls: not in an elastic job")
            return
        timeout = float(self.settings.placement_group_timeout_s)
        try:
            self._place = self._find_place(timeout)
            self.workers, nodes = actors.placed(
                self._place, self._size, {}, timeout + self.settings.timeout_s
            )
            self._job = EngineJob(self._size, env=self._env)
            tickets = self._job.tickets(nodes)
            pairs = zip(self.workers, tickets, strict=True)
            ray.get([worker.update_env_vars.remote(t) for worker, t in pairs])
            calls = [w.start_executable.remote(*self._executable) for w in self.workers]
            self._gather(calls)
        except BaseException:
            self.shutdown()
            raise

    def _find_place(self, timeout: float) -> Place:
        if self._use_current:
            place = actors.current_group(self._resources, self._size)
            if place is not None:
                return place
        if self._hosts is None:
            bundles, strategy = [self._resources] * self._size, "PACK"
            indices = list(range(self._size))
        else:
            whole = {k: v * self._per_host for k, v in self._resources.items()}
            bundles, strategy = [whole] * self._hosts, "STRICT_SPREAD"
            indices = [n // self._per_host for n in range(self._size)]
        group = actors.group_for(bundles, strategy, timeout)
        return Place(self._resources, group, indices, own=True)

    def _gather(
        self, calls: Sequence[Any], callbacks: Callbacks | None = None
    ) -> list[Any]:
        assert self._job is not None
        self._job.again()
        ranks = {ref: rank for rank, ref in enumerate(calls)}
        each = callbacks.serve if callbacks is not None else lambda: None
        return actors.gather(self._job, ranks, each)

    def execute(
        self,
        fn: Callable[[Any], Any],
        callbacks: Sequence[Callable[[Any], None]] | None = None,
    ) -> list[Any]:
        """Calls `fn(executable)` on all workers; the results, by rank.

        Args:
            fn: gets the object of its worker.
            callbacks: get what rank 0 gives to `ray_logger.log`.

        Raises:
            LaunchError: a worker failed.
        """
        self._started("execute")
        notices = Callbacks(callbacks)
        try:
            if notices.queue is not None:
                for worker in self.workers:
                    worker.set_queue.remote(notices.queue)
            return self._gather([w.execute.remote(fn) for w in self.workers], notices)
        finally:
            notices.close()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], None]] | None = None,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on all workers; the results, by rank.

        Raises:
            LaunchError: a worker failed; in an elastic job, the job did.
        """
        args, kwargs = args or (), kwargs or {}
        if self._sizes is None:
            return self.execute(lambda _: fn(*args, **kwargs), callbacks)
        notices = Callbacks(callbacks)
        limits = {"RINGJAX_ELASTIC_TIMEOUT": f"{self._elastic_timeout:g}"}
        try:
            return actors.Elastic(
                self._sizes,
                Place(self._resources),
                {**self._env, **limits},
                Call(fn, args, kwargs, notices.queue),
                start_timeout=float(self.settings.placement_group_timeout_s),
                reset_limit=self._reset_limit,
                each=notices.serve,
            ).run()
        finally:
            notices.close()

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As `run`, but returns Ray's references to the results at once.

        Raises:
            NotImplementedError: the job is elastic.
        """
        self._started("run_remote")
        args, kwargs = args or (), kwargs or {}
        return [w.execute.remote(lambda _: fn(*args, **kwargs)) for w in self.workers]

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(executable)` on rank 0 alone, and returns its result.

        Raises:
            NotImplementedError: the job is elastic.
        """
        self._started("execute_single")
        return ray.get(self.workers[0].execute.remote(fn))

    def _started(self, what: str) -> None:
        if self._sizes is not None:
            raise NotImplementedError(f"RayExecutor.{what}: not in an elastic job; run")
        if not self.workers:
            raise ValueError(f"RayExecutor.{what}: call start() first")

    def shutdown(self) -> None:
        """Ends the workers. May be called twice."""
        actors.end(self.workers)
        self.workers = []
        job, self._job = self._job, None
        if job is not None:
            job.close()
        place, self._place = self._place, None
        if place is not None:
            place.remove()
