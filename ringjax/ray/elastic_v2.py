"""ElasticAdapter: runs the elastic jobs of `RayExecutor`. Horovod's module path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringjax.ray import discovery
from ringjax.ray.actors import no_callback
from ringjax.ray.adapter import Adapter, BaseParams, Executable, get_setting
from ringjax.ray.elastic_jobs import ElasticJob
from ringjax.ray.ray_types import ObjectRef, RayQueue, Result, Task

_UNBOUNDED = 1 << 20


class RayHostDiscovery(discovery.RayHostDiscovery):
    """`ringjax.ray.elastic.RayHostDiscovery` with other argument names."""

    def __init__(
        self,
        use_gpu: bool = False,
        cpus_per_worker: float = 1,
        gpus_per_worker: float | None = 1,
    ) -> None:
        super().__init__(use_gpu, cpus_per_worker, gpus_per_worker)


@dataclass
class ElasticParams(BaseParams):
    """The parameters of an elastic job.

    Attributes:
        min_workers: the number of workers below which the job waits for new workers.
        max_workers: the greatest number of workers; None means as many as fit.
        reset_limit: the number of times that the members may change.
        cooldown_range: the shortest and the longest pause, in seconds, before a new
            worker starts, after several workers in a row have failed soon after their
            start; 1 and 30 by default.
        elastic_timeout: seconds to wait for new workers if too few are left.
        override_discovery: whether Ray decides where workers start; otherwise the
            `discovery` of the settings does.
    """

    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[float] | None = None
    elastic_timeout: float = 600
    override_discovery: bool = True
    elastic = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cooldown_range is not None:
            shortest, longest = self.cooldown_range
            if not 0 < shortest <= longest:
                raise ValueError(
                    f"cooldown_range={self.cooldown_range}: expected 0 < least <= most"
                )

    @property
    def adapter(self) -> type[ElasticAdapter]:
        """The class that runs a job with these parameters."""
        return ElasticAdapter


class ElasticAdapter(Adapter):
    """Starts and ends actors within each call of `execute`; see `RayExecutor`."""

    params: ElasticParams

    def start(self, executable: Executable, env: Mapping[str, str]) -> None:
        """Stores the arguments for `execute`, because no actor stays between calls."""
        self._executable, self._env = executable, dict(env)

    def execute(
        self,
        fn: Task,
        queue: RayQueue = None,
        on_poll: Callable[[], None] = no_callback,
    ) -> list[Result]:
        """Calls `fn(executable)` on all workers; returns the last members' results."""
        params, settings = self.params, self.settings
        cls, args, kwargs = self._executable

        def task(_: None) -> Result:
            return fn(cls(*args, **kwargs) if cls is not None else None)

        found = get_setting(settings, "discovery")
        if params.override_discovery:
            slot = params.use_gpu, params.cpus_per_worker, params.gpus_per_worker
            found = RayHostDiscovery(*slot) if params.max_workers is None else None
        timeout = f"{params.elastic_timeout:g}"
        return ElasticJob(
            task,
            params.resources(),
            sizes=(params.min_workers, params.max_workers or _UNBOUNDED),
            env={**self._env, "RINGJAX_ELASTIC_TIMEOUT": timeout},
            start_timeout=params.elastic_timeout,
            reset_limit=params.reset_limit,
            cooldown=params.cooldown_range,
            discovery=found,
            queue=queue,
            on_poll=on_poll,
        ).run()

    def run_remote(self, fn: Task) -> list[ObjectRef]:
        """Raises an error: between calls, no actor is left to run the function."""
        raise NotImplementedError("RayExecutor.run_remote: not in an elastic job; run")

    def execute_single(self, fn: Task) -> Result:
        """Raises an error: between calls, no actor is left to run the function."""
        raise NotImplementedError(
            "RayExecutor.execute_single: not in an elastic job; run"
        )
