"""Defines `Coordinator`, and provides `RayExecutor` under Horovod's module path."""

from __future__ import annotations

from ringjax.ray.adapter import settings_environment
from ringjax.ray.executor import MiniSettings, RayExecutor
from ringjax.ray.static_jobs import StaticAdapter, StaticParams
from ringjax.run.engine_job import EngineJob, places

__all__ = [
    "Coordinator",
    "MiniSettings",
    "RayExecutor",
    "StaticAdapter",
    "StaticParams",
]


class Coordinator:
    """Forms a job of workers that the program registers; Horovod's class.

    Args:
        settings: the result of `RayExecutor.create_settings`.

    Attributes:
        hostnames: the names of the hosts with workers.
        node_id_by_rank: the ranks of the workers on each node of Ray, by its id.
    """

    def __init__(self, settings: object) -> None:
        self.settings = settings
        self.hostnames: set[str] = set()
        self.node_id_by_rank: dict[str, list[int]] = {}
        self._job: EngineJob | None = None

    @property
    def world_size(self) -> int:
        """The number of registered workers."""
        return sum(map(len, self.node_id_by_rank.values()))

    @property
    def node_id_string(self) -> str:
        """The id of each node and the number of its workers, as ``id:4,id:4``."""
        found = self.node_id_by_rank.items()
        return ",".join(f"{node}:{len(ranks)}" for node, ranks in found)

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Registers a worker."""
        self.hostnames.add(hostname)
        self.node_id_by_rank.setdefault(node_id, []).append(world_rank)

    def finalize_registration(self) -> dict[int, dict[str, int]]:
        """Returns the HOROVOD_* variables of each rank, such as the local rank."""
        where = {r: n for n, ranks in self.node_id_by_rank.items() for r in ranks}
        found = places([where[rank] for rank in sorted(where)])
        names = ("CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        return {
            rank: {f"HOROVOD_{name}": int(place[f"HOROVOD_{name}"]) for name in names}
            for rank, place in zip(sorted(where), found, strict=True)
        }

    def establish_rendezvous(self) -> dict[str, str]:
        """Starts the rendezvous server; returns the workers' environment variables."""
        self._job = EngineJob(self.world_size, env=settings_environment(self.settings))
        return self._job.common_ticket()

    def close(self) -> None:
        """Ends the rendezvous server."""
        if self._job is not None:
            self._job.close()
