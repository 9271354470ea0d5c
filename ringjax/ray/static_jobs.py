"""Jobs of fixed size, whose actors stay between calls: StaticJob and StaticAdapter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from ringjax.ray import actors
from ringjax.ray.actors import POLL_INTERVAL, no_callback
from ringjax.ray.adapter import Adapter, BaseParams, Executable
from ringjax.ray.ray_types import ActorHandle, ObjectRef, RayQueue, Result, Task
from ringjax.ray.strategy import BaseStrategy, ColocatedStrategy, PGStrategy
from ringjax.run.engine_job import EngineJob

# The seconds to wait after the first failure, because other workers may then fail with
# a clearer error.
_AFTER_FAILURE = 1.0


class StaticJob:
    """Actors that run several functions in turn, as a job of fixed size."""

    def __init__(self, strategy: BaseStrategy, env: Mapping[str, str]) -> None:
        self._strategy = strategy
        self._job: EngineJob | None = None
        try:
            self.workers: list[ActorHandle]
            self.workers, _ = strategy.create_workers()
            self._job = EngineJob(len(self.workers), env=env)
            tickets = self._job.tickets(strategy.nodes)
            pairs = zip(self.workers, tickets, strict=True)
            ray.get([worker.update_env_vars.remote(ticket) for worker, ticket in pairs])
        except BaseException:
            self.close()
            raise

    def call(
        self,
        fn: Task,
        queue: RayQueue = None,
        on_poll: Callable[[], None] = no_callback,
        *,
        leave: bool = False,
    ) -> list[Result]:
        """Calls `fn(executable)` on all workers, and returns the results by rank.

        Args:
            fn: the function, which receives the executable of its worker.
            queue: the queue into which `ray_logger.log` of the workers puts messages.
            on_poll: a function that is called several times a second.
            leave: whether the workers leave the job at the end of the call.
        """
        if queue is not None:
            ray.get([worker.set_queue.remote(queue) for worker in self.workers])
        # The function is sent to the cluster once, not for each actor.
        task = ray.put(fn)
        calls = [worker.execute.remote(task, leave) for worker in self.workers]
        return self.gather(calls, on_poll)

    def gather(
        self, calls: Sequence[ObjectRef], on_poll: Callable[[], None] = no_callback
    ) -> list[Result]:
        """Waits for one call on each worker; returns the results by worker."""
        job = self._job
        assert job is not None
        job.again()
        waiting = {ref: rank for rank, ref in enumerate(calls)}
        limit = math.inf
        while waiting and time.monotonic() < limit:
            done, _ = ray.wait(list(waiting), timeout=POLL_INTERVAL)
            on_poll()
            job.poll()
            for ref in done:
                actors.record_outcome(job, waiting.pop(ref), ref)
            if job.over and limit == math.inf:
                limit = time.monotonic() + _AFTER_FAILURE
        return job.results()

    def close(self) -> None:
        """Ends the actors."""
        self._strategy.shutdown()
        self.workers = []
        if self._job is not None:
            self._job.close()


@dataclass
class StaticParams(BaseParams):
    """The parameters of a job of fixed size.

    The size is `num_workers`, or `num_hosts` times `num_workers_per_host`.
    """

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int | None = 1
    use_current_placement_group: bool = True
    elastic = False

    @property
    def adapter(self) -> type[StaticAdapter]:
        """The class that runs a job with these parameters."""
        return StaticAdapter

    def strategy(self, settings: object) -> BaseStrategy:
        """Returns the strategy that starts the workers."""
        common: dict[str, Any] = {
            "settings": settings,
            "use_gpu": self.use_gpu,
            "cpus_per_worker": self.cpus_per_worker,
            "gpus_per_worker": self.gpus_per_worker,
        }
        if self.num_workers:
            return PGStrategy(
                num_workers=self.num_workers,
                force_create_placement_group=not self.use_current_placement_group,
                **common,
            )
        return ColocatedStrategy(
            num_hosts=self.num_hosts or 0,
            num_workers_per_host=self.num_workers_per_host or 1,
            **common,
        )


class StaticAdapter(Adapter):
    """Keeps the actors of a job of fixed size between calls; see `RayExecutor`."""

    params: StaticParams
    strategy: BaseStrategy | None = None
    _job: StaticJob | None = None

    def start(self, executable: Executable, env: Mapping[str, str]) -> None:
        """Starts the actors; each makes its executable."""
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
        fn: Task,
        queue: RayQueue = None,
        on_poll: Callable[[], None] = no_callback,
    ) -> list[Result]:
        """Calls `fn(executable)` on all workers, and returns the results by rank."""
        return self._running().call(fn, queue, on_poll)

    def run_remote(self, fn: Task) -> list[ObjectRef]:
        """Calls `fn(executable)` on all workers, and immediately returns references."""
        return [w.execute.remote(fn) for w in self._running().workers]

    def execute_single(self, fn: Task) -> Result:
        """Calls `fn(executable)` on rank 0, and returns the result."""
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
