"""Where workers are put: a placement group of Ray, and actors in its bundles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import get_current_placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ringjax.ray import actors
from ringjax.ray.adapter import BaseParams, get_setting

_PROCESSES = 30.0  # seconds for processes to begin where there is room for them


def create_placement_group(
    resources_per_bundle: Mapping[str, float],
    num_bundles: int,
    pg_timeout: float,
    pg_strategy: str,
) -> tuple[Any, list[dict[str, float]]]:
    """A placement group of equal bundles, once there is room for all of them.

    Returns:
        The group and its bundles.

    Raises:
        TimeoutError: there is not enough room; it says what is missing.
    """
    bundle = dict(resources_per_bundle)
    group = actors.create_group(bundle, num_bundles, pg_strategy, pg_timeout)
    return group, [dict(bundle) for _ in range(num_bundles)]


class BaseStrategy:
    """Workers in the bundles of a placement group.

    Args:
        needs: resources of a worker.
        num_workers: how many.
        kind: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD, as in Ray.
        timeout: seconds for the cluster to have room, and for workers to start.
        workers_per_bundle: so many workers share a bundle.
        placement_group: one that is there, which is taken instead.

    Attributes:
        workers: Ray's actors, those of a node behind each other.
        nodes: where each is, a name for people and unlike all others'.
    """

    def __init__(
        self,
        needs: Mapping[str, float],
        num_workers: int,
        *,
        kind: str,
        timeout: float,
        workers_per_bundle: int = 1,
        placement_group: Any = None,
    ) -> None:
        self._needs, self._kind = dict(needs), kind
        self._timeout, self._workers_per_bundle = timeout, workers_per_bundle
        self.num_workers, self.placement_group = num_workers, placement_group
        self.workers: list[Any] = []
        self.nodes: list[str] = []
        self._created_placement_group = False  # Horovod's tests ask for it

    def create_workers(self) -> tuple[list[Any], list[Any]]:
        """Starts the workers; each sees all GPUs of its node's workers.

        Returns:
            All of them, and one of each node.

        Raises:
            TimeoutError: there is no room, or not all have started.
        """
        if self.placement_group is None:
            self.placement_group, _ = create_placement_group(
                {k: v * self._workers_per_bundle for k, v in self._needs.items()},
                self.num_workers // self._workers_per_bundle,
                self._timeout,
                self._kind,
            )
            self._created_placement_group = True
        for n in range(self.num_workers):
            # In a group of somebody else's: where there is room.
            index = (
                n // self._workers_per_bundle if self._created_placement_group else -1
            )
            place = PlacementGroupSchedulingStrategy(self.placement_group, index)
            self.workers.append(actors.start_actor(self._needs, place))
        found = self._places()
        nodes = [node for node, _ in found]
        order = sorted(range(len(nodes)), key=lambda i: (nodes.index(nodes[i]), i))
        self.workers = [self.workers[i] for i in order]
        self.nodes = [nodes[i] for i in order]
        gpus: dict[str, list[Any]] = {}
        for node, ids in found:
            gpus.setdefault(node, []).extend(ids)
        ray.get(
            [
                worker.update_env_vars.remote(
                    {"CUDA_VISIBLE_DEVICES": ",".join(map(str, dict.fromkeys(ids)))}
                )
                for worker, node in zip(self.workers, self.nodes, strict=True)
                if (ids := gpus[node])
            ]
        )
        return self.workers, list(
            dict(zip(self.nodes, self.workers, strict=True)).values()
        )

    def _places(self) -> list[Any]:
        # Though the group is ready: its node may be lost just then.
        refs = [worker.host_and_gpus.remote() for worker in self.workers]
        limit = self._timeout + _PROCESSES
        try:
            return list(ray.get(refs, timeout=limit))
        except GetTimeoutError:
            late = len(ray.wait(refs, num_returns=len(refs), timeout=0)[1])
            raise TimeoutError(
                f"{late} of {len(refs)} workers of "
                f"{actors.format_resources(self._needs)} have not started "
                f"{actors.describe_shortage(self._needs, late, limit)}"
            ) from None

    def shutdown(self) -> None:
        """Ends the workers, and gives the placement group back if it made it."""
        actors.kill_actors(self.workers)
        self.workers, self.nodes = [], []
        if self._created_placement_group:
            remove_placement_group(self.placement_group)
            self.placement_group, self._created_placement_group = None, False


class PGStrategy(BaseStrategy):
    """Workers packed onto few nodes; Horovod's class, with its arguments.

    Args:
        settings: of `RayExecutor.create_settings`.
        num_workers: how many.
        use_gpu, cpus_per_worker, gpus_per_worker: what each needs.
        placement_group: take this one; by default that in which this process runs.
        force_create_placement_group: make one in any case.
    """

    def __init__(
        self,
        *,
        settings: Any,
        num_workers: int,
        use_gpu: bool,
        cpus_per_worker: float,
        gpus_per_worker: float | None,
        placement_group: Any = None,
        force_create_placement_group: bool = False,
    ) -> None:
        group = placement_group or get_current_placement_group()
        super().__init__(
            BaseParams(cpus_per_worker, use_gpu, gpus_per_worker).resources(),
            num_workers,
            kind="PACK",
            timeout=float(get_setting(settings, "placement_group_timeout_s")),
            placement_group=None if force_create_placement_group else group,
        )


class ColocatedStrategy(BaseStrategy):
    """Equally many workers on each of some nodes; Horovod's class.

    Args:
        settings: of `RayExecutor.create_settings`.
        num_hosts, num_workers_per_host: how many where.
        use_gpu, cpus_per_worker, gpus_per_worker: what each needs.
    """

    def __init__(
        self,
        *,
        settings: Any,
        num_hosts: int,
        num_workers_per_host: int,
        use_gpu: bool,
        cpus_per_worker: float,
        gpus_per_worker: float | None,
    ) -> None:
        super().__init__(
            BaseParams(cpus_per_worker, use_gpu, gpus_per_worker).resources(),
            num_hosts * num_workers_per_host,
            kind="STRICT_SPREAD",
            timeout=float(get_setting(settings, "placement_group_timeout_s")),
            workers_per_bundle=num_workers_per_host,
        )
