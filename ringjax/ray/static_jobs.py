"""A job of fixed size whose actors stay, and run one function after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from ringjax.ray import actors
from ringjax.ray.actors import POLL_INTERVAL, no_callback
from ringjax.ray.strategy import BaseStrategy
from ringjax.run.engine_job import EngineJob

_AFTER_FAILURE = 1.0  # seconds for the others to fail with a clear error of their own


class StaticJob:
    """Actors that stay, and run one function after the other as a job of fixed size.

    Args:
        strategy: starts the actors.
        env: variables for all.

    Raises:
        TimeoutError: there is no room, or not all actors have started.
    """

    def __init__(self, strategy: BaseStrategy, env: Mapping[str, str]) -> None:
        self._strategy = strategy
        self._job: EngineJob | None = None
        try:
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
        fn: Callable[[Any], Any],
        queue: Any = None,
        each: Callable[[], None] = no_callback,
        *,
        leave: bool = False,
    ) -> list[Any]:
        """Calls `fn(executable)` on all workers; the results, by rank.

        Raises:
            LaunchError: a worker failed.
        """
        if queue is not None:
            ray.get([worker.set_queue.remote(queue) for worker in self.workers])
        task = ray.put(fn)  # once, however many actors
        return self.gather([w.execute.remote(task, leave) for w in self.workers], each)

    def gather(
        self, calls: Sequence[Any], each: Callable[[], None] = no_callback
    ) -> list[Any]:
        """The results of calls of all workers, in their order; raises as `call`."""
        job = self._job
        assert job is not None
        job.again()
        waiting = {ref: rank for rank, ref in enumerate(calls)}
        limit = math.inf
        while waiting and time.monotonic() < limit:
            done, _ = ray.wait(list(waiting), timeout=POLL_INTERVAL)
            each()
            job.poll()
            for ref in done:
                actors.settle_call(job, waiting.pop(ref), ref)
            if job.over and limit == math.inf:
                limit = time.monotonic() + _AFTER_FAILURE
        return job.results()

    def close(self) -> None:
        """Ends the actors."""
        self._strategy.shutdown()
        self.workers = []
        if self._job is not None:
            self._job.close()
