"""A job of fixed size whose actors stay, and run one function after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import get_current_placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ringjax.ray import actors
from ringjax.ray.actors import LOOK, nothing
from ringjax.run.engine_job import EngineJob

_AFTER_FAILURE = 1.0  # seconds for the others to fail with a clear error of their own
_PROCESSES = 30.0  # seconds for processes to begin where there is room for them


class StaticJob:
    """Actors that stay, and run one function after the other as a job of fixed size.

    Args:
        needs: resources of an actor.
        size: how many.
        env: variables for all.
        strategy: of the placement group, if one has to be made.
        start_timeout: seconds for the cluster to have room, and for actors to start.
        together: so many actors share a bundle of the placement group.
        inherit: use the placement group in which this process runs, if there is one.

    Raises:
        TimeoutError: there is no room, or not all actors have started.
    """

    def __init__(
        self,
        needs: Mapping[str, float],
        *,
        size: int,
        env: Mapping[str, str],
        strategy: str,
        start_timeout: float,
        together: int = 1,
        inherit: bool = False,
    ) -> None:
        self.workers: list[Any] = []
        self._job: EngineJob | None = None
        self._group: Any = None
        group = get_current_placement_group() if inherit else None
        if group is None:
            bundle = {k: v * together for k, v in needs.items()}
            group = actors.group_of(bundle, size // together, strategy, start_timeout)
            self._group = group
        try:
            for n in range(size):
                index = n // together if self._group else -1  # -1: where there is room
                place = PlacementGroupSchedulingStrategy(group, index)
                self.workers.append(actors.start(needs, place))
            self._join(needs, env, start_timeout)
        except BaseException:
            self.close()
            raise

    @property
    def _created_placement_group(self) -> bool:  # as Horovod's tests ask for it
        return self._group is not None

    def _join(
        self, needs: Mapping[str, float], env: Mapping[str, str], timeout: float
    ) -> None:
        # Though the group is ready: its node may be lost just then.
        refs = [worker.place.remote() for worker in self.workers]
        try:
            found = ray.get(refs, timeout=timeout + _PROCESSES)
        except GetTimeoutError:
            late = len(ray.wait(refs, num_returns=len(refs), timeout=0)[1])
            raise TimeoutError(
                f"{late} of {len(refs)} workers of {actors.shown(needs)} have not "
                f"started {actors.shortage(needs, late, timeout + _PROCESSES)}"
            ) from None
        nodes = [node for node, _ in found]
        order = sorted(range(len(nodes)), key=lambda i: (nodes.index(nodes[i]), i))
        self.workers = [self.workers[i] for i in order]
        self._job = EngineJob(len(order), env=env)
        setting = []
        for n, ticket in enumerate(self._job.tickets([nodes[i] for i in order])):
            # All GPUs of the node's workers, so that the local rank picks one.
            gpus = [g for node, ids in found if node == nodes[order[n]] for g in ids]
            if gpus:
                ticket["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, dict.fromkeys(gpus)))
            setting.append(self.workers[n].update_env_vars.remote(ticket))
        ray.get(setting)

    def call(
        self,
        fn: Callable[[Any], Any],
        queue: Any = None,
        each: Callable[[], None] = nothing,
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
        self, calls: Sequence[Any], each: Callable[[], None] = nothing
    ) -> list[Any]:
        """The results of calls of all workers, in their order; raises as `call`."""
        job = self._job
        assert job is not None
        job.again()
        waiting = {ref: rank for rank, ref in enumerate(calls)}
        limit = math.inf
        while waiting and time.monotonic() < limit:
            done, _ = ray.wait(list(waiting), timeout=LOOK)
            each()
            job.poll()
            for ref in done:
                actors.settle(job, waiting.pop(ref), ref)
            if job.over and limit == math.inf:
                limit = time.monotonic() + _AFTER_FAILURE
        return job.results()

    def close(self) -> None:
        """Ends the actors."""
        actors.end(self.workers)
        self.workers = []
        if self._job is not None:
            self._job.close()
        if self._group is not None:
            remove_placement_group(self._group)
