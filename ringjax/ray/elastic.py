"""Horovod's `ElasticRayExecutor`: a function in an elastic job on a cluster of Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from ringjax.ray.actors import Elastic, Place
from ringjax.ray.jobs import Call
from ringjax.ray.ray_logger import Callbacks
from ringjax.ray.runner import MiniSettings, resources_of


class RayHostDiscovery:
    """The nodes that have room for a whole worker, counted in workers.

    Args:
        use_gpu: whether a worker needs a GPU.
        cpus_per_slot, gpus_per_slot: what it needs.
    """

    def __init__(
        self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1
    ) -> None:
        self._needs = resources_of(
            cpus_per_slot, use_gpu, gpus_per_slot if use_gpu else None
        )

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Address of each living node -> workers that fit into all it has."""
        found: dict[str, int] = {}
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            has = node["Resources"]
            slots = min(int(has.get(k, 0) // v) for k, v in self._needs.items() if v)
            if slots:
                name = node["NodeManagerAddress"]
                found[name] = found.get(name, 0) + slots
        return found


class ElasticRayExecutor:
    """Runs a function in an elastic job; Horovod's class, with its arguments.

    Args:
        settings: from `create_settings`.
        use_gpu, cpus_per_slot, gpus_per_slot: what a worker needs.
        env_vars: variables for the workers.
        override_discovery: without effect; Ray knows its nodes.

    Example:
        >>> settings = ElasticRayExecutor.create_settings(min_num_proc=2)
        >>> executor = ElasticRayExecutor(settings, use_gpu=True)
        >>> executor.start()  # doctest: +SKIP
        >>> executor.run(train)  # doctest: +SKIP
    """

    @classmethod
    def create_settings(
        cls,
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Sequence[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> MiniSettings:
        """The settings; `min_np` and `max_np` are older names, others are not used."""
        return MiniSettings(
            timeout_s=timeout_s,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            elastic_timeout=elastic_timeout,
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
        )

    def __init__(
        self,
        settings: MiniSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        self.settings = settings
        self._resources = resources_of(cpus_per_slot, use_gpu, gpus_per_slot)
        self._discovery = RayHostDiscovery(use_gpu, cpus_per_slot, gpus_per_slot or 1)
        self._env = dict(env_vars or {})

    def start(self) -> None:
        """Connects with Ray. Workers are started by `run`."""
        if not ray.is_initialized():
            ray.init()

    def run(
        self,
        worker_fn: Callable[[], Any],
        callbacks: Sequence[Callable[[Any], None]] | None = None,
    ) -> list[Any]:
        """Calls the function on all workers; the results of those at the end, by rank.

        Args:
            worker_fn: uses `ringjax.elastic.run`.
            callbacks: get what rank 0 gives to `ray_logger.log`.

        Raises:
            LaunchError: the job has failed.
            TimeoutError: the cluster has no room for the least number of workers.
        """
        self.start()
        least, most = self.settings.min_num_proc, self.settings.max_num_proc
        if most is None:  # as many as the cluster has room for now
            slots = sum(self._discovery.find_available_hosts_and_slots().values())
            most = max(least, slots)
        notices = Callbacks(callbacks)
        try:
            return Elastic(
                (least, most),
                Place(self._resources),
                {**self.settings.env(), **self._env},
                Call(worker_fn, (), {}, notices.queue),
                start_timeout=self.settings.elastic_timeout,
                reset_limit=self.settings.reset_limit,
                each=notices.serve,
            ).run()
        finally:
            notices.close()
