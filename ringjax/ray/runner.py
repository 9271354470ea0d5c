"""Horovod's `RayExecutor`: actors that stay, and run one function after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from ringjax.ray.actors import no_callback
from ringjax.ray.adapter import Adapter, BaseParams, settings_environment
from ringjax.ray.elastic_v2 import ElasticParams
from ringjax.ray.jobs import is_client
from ringjax.ray.ray_logger import DriverLogger
from ringjax.ray.static_jobs import StaticJob
from ringjax.ray.strategy import BaseStrategy, ColocatedStrategy, PGStrategy
from ringjax.run.engine_job import EngineJob, places
from ringjax.run.environ import own_settings

Function = Callable[..., Any]
Functions = Sequence[Callable[[Any], None]]


@dataclass
class MiniSettings:
    """What `create_settings` returns; those without a word have no effect here.

    Attributes:
        nics: network interfaces that the workers may use.
        timeout_s: for all workers to call `init`.
        placement_group_timeout_s: for the cluster to have room.
        discovery: a `HostDiscovery`, for `override_discovery=False`.
    """

    nics: Sequence[str] | None = None
    verbose: int = 1
    key: Any = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False
    discovery: Any = None


class Coordinator:
    """Brings workers together that something else has started.

    Args:
        settings: of `create_settings`.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.hostnames: set[str] = set()
        self.node_id_by_rank: dict[str, list[int]] = {}
        self._job: EngineJob | None = None

    @property
    def world_size(self) -> int:
        """How many there are."""
        return sum(map(len, self.node_id_by_rank.values()))

    @property
    def node_id_string(self) -> str:
        """The nodes, with the numbers of workers on them."""
        found = self.node_id_by_rank.items()
        return ",".join(f"{node}:{len(ranks)}" for node, ranks in found)

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Takes note of a worker."""
        self.hostnames.add(hostname)
        self.node_id_by_rank.setdefault(node_id, []).append(world_rank)

    def finalize_registration(self) -> dict[int, dict[str, int]]:
        """Rank -> the variables that say where it is among the others."""
        where = {r: n for n, ranks in self.node_id_by_rank.items() for r in ranks}
        found = places([where[rank] for rank in sorted(where)])
        names = ("CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        return {
            rank: {f"HOROVOD_{name}": int(place[f"HOROVOD_{name}"]) for name in names}
            for rank, place in zip(sorted(where), found, strict=True)
        }

    def establish_rendezvous(self) -> dict[str, str]:
        """Starts the server where they meet; the variables that all of them need."""
        self._job = EngineJob(self.world_size, env=settings_environment(self.settings))
        return self._job.common_ticket()

    def close(self) -> None:
        """Ends the server."""
        if self._job is not None:
            self._job.close()


@dataclass
class StaticParams(BaseParams):
    """Of a job of a fixed size, given by `num_workers` or by `num_hosts`."""

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int | None = 1
    use_current_placement_group: bool = True
    elastic = False

    @property
    def adapter(self) -> type[StaticAdapter]:
        """What does the work."""
        return StaticAdapter

    def strategy(self, settings: Any) -> BaseStrategy:
        """What starts the workers."""
        needs: dict[str, Any] = {
            "settings": settings,
            "use_gpu": self.use_gpu,
            "cpus_per_worker": self.cpus_per_worker,
            "gpus_per_worker": self.gpus_per_worker,
        }
        if self.num_workers:
            create = not self.use_current_placement_group
            needs["force_create_placement_group"] = create
            return PGStrategy(num_workers=self.num_workers, **needs)
        return ColocatedStrategy(
            num_hosts=self.num_hosts or 0,
            num_workers_per_host=self.num_workers_per_host or 1,
            **needs,
        )


class StaticAdapter(Adapter):
    """Keeps the actors of a job of fixed size; see `RayExecutor`."""

    params: StaticParams
    strategy: BaseStrategy | None = None
    _job: StaticJob | None = None

    def start(
        self, executable: Sequence[Any] = (None, (), {}), env: Mapping[str, str] = {}
    ) -> None:
        """Starts the actors, and makes an object of a class on each."""
        self.strategy = self.params.strategy(self.settings)
        self._job = StaticJob(self.strategy, env)
        self.workers = self.strategy.workers
        try:
            made = [w.start_executable.remote(*executable) for w in self.workers]
            self._job.gather(made)
        except BaseException:
            self.shutdown()
            raise

    def execute(
        self,
        fn: Callable[[Any], Any],
        queue: Any = None,
        each: Callable[[], None] = no_callback,
    ) -> list[Any]:
        """Calls `fn(executable)` on all workers; the results, by rank."""
        return self._running().call(fn, queue, each)

    def run_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        """The same, but Ray's references to the results, at once."""
        return [w.execute.remote(fn) for w in self._running().workers]

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(executable)` on rank 0 alone."""
        return ray.get(self._running().workers[0].execute.remote(fn))

    def _running(self) -> StaticJob:
        if self._job is None:
            raise ValueError("RayExecutor: it was shut down; call start() first")
        return self._job

    def shutdown(self) -> None:
        """Ends the actors."""
        job, self._job, self.strategy, self.workers = self._job, None, None, []
        if job is not None:
            job.close()


class RayExecutor:
    """Actors that form a job; Horovod's class, with its arguments.

    With `num_workers` they are packed onto few nodes; `num_hosts` nodes get
    `num_workers_per_host` each. With `min_workers` the job is elastic: then `run`
    starts and ends actors itself, and they do not stay. For a client of a cluster
    (`ray://`) an actor there does the work.

    Args:
        settings: from `create_settings`.
        num_workers: how many.
        num_hosts, num_workers_per_host: the same by nodes.
        cpus_per_worker, use_gpu, gpus_per_worker: what each needs.
        use_current_placement_group: take that in which this process runs, if any.
        min_workers, max_workers, reset_limit, cooldown_range, elastic_timeout,
        override_discovery: of an elastic job, see `ElasticParams`.

    Attributes:
        adapter: holds `workers`, Ray's actors; itself an actor for a client.

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
            nics=nics,
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )

    def __init__(
        self,
        settings: Any = None,
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
        needs = cpus_per_worker, use_gpu, gpus_per_worker
        self.params: StaticParams | ElasticParams
        if min_workers is not None:
            self.params = ElasticParams(
                *needs,
                min_workers=min_workers,
                max_workers=max_workers,
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                elastic_timeout=elastic_timeout,
                override_discovery=override_discovery,
            )
        else:
            sizes = num_workers, num_hosts, num_workers_per_host
            self.params = StaticParams(*needs, *sizes, use_current_placement_group)
        self.settings = settings if settings is not None else self.create_settings()
        self.settings.elastic = self.params.elastic
        self.adapter: Any = None
        self._remote = False

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
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
        adapter: Any = self.params.adapter
        self._remote = is_client()
        if self._remote:  # two calls at a time, so that shutdown can break one off
            adapter = ray.remote(num_cpus=0, max_concurrency=2)(adapter).remote
        self.adapter = adapter(self.settings, self.params)
        env = {**own_settings(), **settings_environment(self.settings)}
        env |= {name: str(value) for name, value in (extra_env_vars or {}).items()}
        made = executable_cls, executable_args or (), executable_kwargs or {}
        self._do("start", made, env)

    def _do(self, what: str, *args: Any, callbacks: Functions | None = None) -> Any:
        if self.adapter is None:
            raise ValueError(f"RayExecutor.{what}: call start() first")
        method = getattr(self.adapter, what)
        with DriverLogger(callbacks) as logger:
            if what == "execute":
                args += (logger.queue,)
            if self._remote:
                return logger.wait_for(method.remote(*args))
            return method(*args, *[logger.dispatch] * (what == "execute"))

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Functions | None = None
    ) -> list[Any]:
        """Calls `fn(executable)` on all workers; the results, by rank.

        Args:
            fn: gets the object of its worker.
            callbacks: get what ranks give to `ray_logger.log`.

        Raises:
            LaunchError: a worker failed; in an elastic job, the job did.
            TimeoutError: an elastic job finds no room.
        """
        return list(self._do("execute", fn, callbacks=callbacks))

    def run(
        self,
        fn: Function,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Functions | None = None,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on all workers; as `execute` otherwise."""
        return self.execute(_applied(fn, args, kwargs), callbacks)

    def run_remote(
        self,
        fn: Function,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As `run`, but returns Ray's references to the results at once.

        Raises:
            NotImplementedError: the job is elastic.
        """
        return list(self._do("run_remote", _applied(fn, args, kwargs)))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(executable)` on rank 0 alone, and returns its result.

        Raises:
            NotImplementedError: the job is elastic.
        """
        return self._do("execute_single", fn)

    def shutdown(self) -> None:
        """Ends the workers. May be called twice."""
        adapter, self.adapter = self.adapter, None
        if adapter is not None and self._remote:
            with contextlib.suppress(RayError):  # its node may be gone
                ray.get(adapter.shutdown.remote())
            ray.kill(adapter)
        elif adapter is not None:
            adapter.shutdown()


def _applied(
    fn: Function, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    given, named = tuple(args or ()), dict(kwargs or {})
    return lambda _: fn(*given, **named)
