"""Horovod's place for the elastic half of `RayExecutor`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringjax.ray import discovery
from ringjax.ray.actors import no_callback
from ringjax.ray.adapter import Adapter, BaseParams, get_setting
from ringjax.ray.elastic_jobs import ElasticJob

_UNBOUNDED = 1 << 20


class RayHostDiscovery(discovery.RayHostDiscovery):
    """As `ringjax.ray.elastic.RayHostDiscovery`, with other names of its arguments."""

    def __init__(
        self,
        use_gpu: bool = False,
        cpus_per_worker: float = 1,
        gpus_per_worker: float | None = 1,
    ) -> None:
        super().__init__(use_gpu, cpus_per_worker, gpus_per_worker)


@dataclass
class ElasticParams(BaseParams):
    """Of an elastic job.

    Attributes:
        min_workers, max_workers: least and most; without a most, as the cluster grows.
        reset_limit: how often the members may change.
        cooldown_range: least and longest seconds without a new worker, after several
            in a row have failed soon after their start; 1 and 30 by default.
        elastic_timeout: seconds for newcomers if too few workers are left.
        override_discovery: whether Ray says where there is room; otherwise the
            settings' `discovery` does.
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
            least, longest = self.cooldown_range
            if not 0 < least <= longest:
                raise ValueError(
                    f"cooldown_range={self.cooldown_range}: expected 0 < least <= most"
                )

    @property
    def adapter(self) -> type[ElasticAdapter]:
        """What does the work."""
        return ElasticAdapter


class ElasticAdapter(Adapter):
    """Starts and ends actors in each `run`; see `RayExecutor`."""

    params: ElasticParams

    def start(
        self, executable: Sequence[Any] = (None, (), {}), env: Mapping[str, str] = {}
    ) -> None:
        """Only takes note; there is nothing that stays."""
        self._executable, self._env = executable, dict(env)

    def execute(
        self,
        fn: Callable[[Any], Any],
        queue: Any = None,
        each: Callable[[], None] = no_callback,
    ) -> list[Any]:
        """Calls `fn(executable)` on all workers; results of those at the end."""
        params, settings = self.params, self.settings
        cls, args, kwargs = self._executable

        def task(_: Any) -> Any:
            return fn(cls(*args, **kwargs) if cls is not None else None)

        found = get_setting(settings, "discovery")
        if params.override_discovery:
            ask = params.use_gpu, params.cpus_per_worker, params.gpus_per_worker
            found = RayHostDiscovery(*ask) if params.max_workers is None else None
        timeout = f"{params.elastic_timeout:g}"
        return ElasticJob(
            task,
            params.resources(),
            sizes=(params.min_workers, params.max_workers or _UNBOUNDED),
            env={**self._env, "RINGJAX_ELASTIC_TIMEOUT": timeout},
            start_timeout=params.elastic_timeout,
            reset_limit=params.reset_limit,
            cooldown=params.cooldown_range,
            hosts=found,
            queue=queue,
            each=each,
        ).run()

    def run_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Not in an elastic job."""
        raise NotImplementedError("RayExecutor.run_remote: not in an elastic job; run")

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Not in an elastic job."""
        raise NotImplementedError(
            "RayExecutor.execute_single: not in an elastic job; run"
        )
