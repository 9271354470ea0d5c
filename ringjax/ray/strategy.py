"""Strategies that start workers in a placement group; Horovod's module path."""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ringjax.ray import actors
from ringjax.ray.adapter import BaseParams, get_setting
from ringjax.ray.ray_types import ActorHandle

# The seconds in which the processes of actors must start after the cluster has reserved
# the resources.
_PROCESSES = 30.0


def create_placement_group(
    resources_per_bundle: Mapping[str, float],
    num_bundles: int,
    pg_timeout: float,
    pg_strategy: str,
) -> tuple[PlacementGroup, list[dict[str, float]]]:
    """Creates a placement group of equal bundles, and waits until Ray has placed it.

    Returns:
        The group and its bundles.

    Raises:
        TimeoutError: the cluster has no room; the text names the missing resources.
    """
    bundles = [dict(resources_per_bundle) for _ in range(num_bundles)]
    group = placement_group(bundles, strategy=pg_strategy)
    if not group.wait(pg_timeout):
        remove_placement_group(group)
        resources = actors.format_resources(resources_per_bundle)
        shortage = actors.describe_shortage(
            resources_per_bundle, num_bundles, pg_timeout
        )
        raise TimeoutError(
            f"no room for the placement group {pg_strategy} of {num_bundles} x "
            f"{resources} {shortage}"
        )
    return group, bundles


class BaseStrategy:
    """Starts workers in the bundles of a placement group.

    Args:
        resources, num_workers: the resources of a worker, and the number of workers.
        placement: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD, as in Ray.
        timeout: seconds until the cluster must have room.
        workers_per_bundle: the number of workers that share a bundle.
        placement_group: an existing placement group in which the workers start. If it
            is None, the strategy creates a placement group.

    Attributes:
        workers: the actors; the actors of a node follow each other.
        nodes: the node of each worker, by a unique and readable name.
    """

    def __init__(
        self,
        resources: Mapping[str, float],
        num_workers: int,
        *,
        placement: str,
        timeout: float,
        workers_per_bundle: int = 1,
        placement_group: PlacementGroup | None = None,
    ) -> None:
        self._resources, self._placement = dict(resources), placement
        self._timeout, self._workers_per_bundle = timeout, workers_per_bundle
        self.num_workers, self.placement_group = num_workers, placement_group
        self.workers: list[ActorHandle] = []
        self.nodes: list[str] = []
        self._created_placement_group = False  # Horovod's tests read this attribute

    def create_workers(self) -> tuple[list[ActorHandle], list[ActorHandle]]:
        """Starts the workers. Each worker sees the GPUs of all workers on its node.

        Returns:
            All workers, and one worker of each node.

        Raises:
            TimeoutError: the cluster has no room, or not all workers have started.
        """
        if self.placement_group is None:
            self.placement_group, _ = create_placement_group(
                {k: v * self._workers_per_bundle for k, v in self._resources.items()},
                self.num_workers // self._workers_per_bundle,
                self._timeout,
                self._placement,
            )
            self._created_placement_group = True
        for n in range(self.num_workers):
            # In an existing group, Ray looks for a bundle that has room (index -1).
            index = (
                n // self._workers_per_bundle if self._created_placement_group else -1
            )
            bundle = PlacementGroupSchedulingStrategy(self.placement_group, index)
            self.workers.append(actors.start_actor(self._resources, bundle))
        found = self._locate_workers()
        nodes = [node for node, _ in found]
        order = sorted(range(len(nodes)), key=lambda i: (nodes.index(nodes[i]), i))
        self.workers = [self.workers[i] for i in order]
        self.nodes = [nodes[i] for i in order]
        gpus: dict[str, list[int | str]] = {}
        for node, ids in found:
            gpus.setdefault(node, []).extend(ids)
        updates = []
        for worker, node in zip(self.workers, self.nodes, strict=True):
            if ids := gpus[node]:
                visible = ",".join(map(str, dict.fromkeys(ids)))
                update = worker.update_env_vars.remote(
                    {"CUDA_VISIBLE_DEVICES": visible}
                )
                updates.append(update)
        ray.get(updates)
        worker_of = dict(zip(self.nodes, self.workers, strict=True))
        return self.workers, list(worker_of.values())

    def _locate_workers(self) -> list[tuple[str, list[int | str]]]:
        """Waits until all workers have started; returns their nodes and GPUs."""
        # Wait with a time limit. If a node is lost after Ray has placed a bundle there,
        # the actors of this bundle wait for another node, maybe forever.
        refs = [worker.host_and_gpus.remote() for worker in self.workers]
        limit = self._timeout + _PROCESSES
        try:
            return list(ray.get(refs, timeout=limit))
        except GetTimeoutError:
            late = len(ray.wait(refs, num_returns=len(refs), timeout=0)[1])
            raise TimeoutError(
                f"{late} of {len(refs)} workers of "
                f"{actors.format_resources(self._resources)} have not started "
                f"{actors.describe_shortage(self._resources, late, limit)}"
            ) from None

    def shutdown(self) -> None:
        """Ends the workers; removes the placement group if the strategy created it."""
        actors.kill_actors(self.workers)
        self.workers, self.nodes = [], []
        if self._created_placement_group:
            remove_placement_group(self.placement_group)
            self.placement_group, self._created_placement_group = None, False


class PGStrategy(BaseStrategy):
    """Packs workers onto few nodes; Horovod's class, with its arguments.

    Args:
        settings: the result of `RayExecutor.create_settings`.
        num_workers: the number of workers.
        use_gpu, cpus_per_worker, gpus_per_worker: the resources of a worker.
        placement_group: an existing placement group. If it is None, the workers use the
            group of this process, or a new group.
        force_create_placement_group: whether to create a new group even if there is a
            group.
    """

    def __init__(
        self,
        *,
        settings: object,
        num_workers: int,
        use_gpu: bool,
        cpus_per_worker: float,
        gpus_per_worker: float | None,
        placement_group: PlacementGroup | None = None,
        force_create_placement_group: bool = False,
    ) -> None:
        group = placement_group or get_current_placement_group()
        super().__init__(
            BaseParams(cpus_per_worker, use_gpu, gpus_per_worker).resources(),
            num_workers,
            placement="PACK",
            timeout=float(get_setting(settings, "placement_group_timeout_s")),
            placement_group=None if force_create_placement_group else group,
        )


class ColocatedStrategy(BaseStrategy):
    """Starts equally many workers on each of some nodes; Horovod's class.

    Args:
        settings: the result of `RayExecutor.create_settings`.
        num_hosts: the number of nodes.
        num_workers_per_host: the number of workers on each node.
        use_gpu, cpus_per_worker, gpus_per_worker: the resources of a worker.
    """

    def __init__(
        self,
        *,
        settings: object,
        num_hosts: int,
        num_workers_per_host: int,
        use_gpu: bool,
        cpus_per_worker: float,
        gpus_per_worker: float | None,
    ) -> None:
        super().__init__(
            BaseParams(cpus_per_worker, use_gpu, gpus_per_worker).resources(),
            num_hosts * num_workers_per_host,
            placement="STRICT_SPREAD",
            timeout=float(get_setting(settings, "placement_group_timeout_s")),
            workers_per_bundle=num_workers_per_host,
        )
