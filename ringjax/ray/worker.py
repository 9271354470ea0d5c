"""The actor's class: a process of Ray that is a rank, of one job or several in turn."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from ringjax.ray import ray_logger
from ringjax.runtime import lifecycle, reused_process


class BaseHorovodWorker:
    """A worker of `RayExecutor`, to be made an actor of Ray; Horovod's name.

    Args:
        world_rank, world_size: what its environment says until a job says otherwise.

    Attributes:
        executable: what `start_executable` has made.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        place = {"HOROVOD_RANK": world_rank, "HOROVOD_SIZE": world_size}
        self.update_env_vars(place)

    def node_id(self) -> str:
        """Ray's name of the node."""
        return str(ray.get_runtime_context().get_node_id())

    def hostname(self) -> str:
        """The name of the node's machine."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[Any]:
        """The GPUs that Ray has assigned to this actor."""
        return list(ray.get_gpu_ids())

    def host_and_gpus(self) -> tuple[str, list[Any]]:
        """A name of the node, for people and unlike all others', and the GPUs there.

        Two nodes of Ray on one machine are two hosts.
        """
        return f"{self.hostname()}-{self.node_id()[:8]}", self.get_gpu_ids()

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Sets variables of the environment."""
        reused_process.set_environment(
            {name: str(value) for name, value in env_vars.items()}
        )

    def env_vars(self) -> dict[str, str]:
        """The environment."""
        return reused_process.get_environment()

    def set_queue(self, queue: Any) -> None:
        """Where `ray_logger.log` puts what it is given."""
        ray_logger.configure(queue)

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes the object that `execute` hands to its function."""
        self.executable = None
        if executable_cls is not None:
            args, kwargs = executable_args or (), executable_kwargs or {}
            self.executable = reused_process.call_reporting_failure(
                executable_cls, args, kwargs
            )

    def execute(self, func: Callable[[Any], Any], leave: bool = False) -> Any:
        """Calls `func(executable)` as a rank.

        The job lasts until `func` leaves it, or ends with the call if `leave` is true.
        """
        try:
            return reused_process.call_reporting_failure(func, (self.executable,))
        finally:
            if leave:
                lifecycle.shutdown()
