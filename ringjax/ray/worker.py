"""BaseHorovodWorker: the class of the actors that run as ranks of a job."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from ringjax.ray import ray_logger
from ringjax.ray.ray_types import RayQueue, Task
from ringjax.runtime import lifecycle, reused_process


class BaseHorovodWorker:
    """A worker of a job; Horovod's class, of which `ray.remote` makes actors.

    Args:
        world_rank, world_size: rank and size in the environment of the process, until
            a job sets other variables.

    Attributes:
        executable: the object that `start_executable` has made.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self.update_env_vars({"HOROVOD_RANK": world_rank, "HOROVOD_SIZE": world_size})

    def node_id(self) -> str:
        """Returns Ray's id of the node."""
        return str(ray.get_runtime_context().get_node_id())

    def hostname(self) -> str:
        """Returns the name of the machine."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[int | str]:
        """Returns the GPUs that Ray has assigned to this actor."""
        return list(ray.get_gpu_ids())

    def host_and_gpus(self) -> tuple[str, list[int | str]]:
        """Returns a unique and readable name of the node, and this actor's GPUs.

        The name contains Ray's id, so two nodes of Ray on one machine are two hosts.
        """
        return f"{self.hostname()}-{self.node_id()[:8]}", self.get_gpu_ids()

    def update_env_vars(self, env_vars: Mapping[str, object]) -> None:
        """Sets variables in the environment of the process."""
        reused_process.set_environment(
            {name: str(value) for name, value in env_vars.items()}
        )

    def env_vars(self) -> dict[str, str]:
        """Returns the environment of the process."""
        return reused_process.get_environment()

    def set_queue(self, queue: RayQueue) -> None:
        """Sets the queue into which `ray_logger.log` puts messages."""
        ray_logger.configure(queue)

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[object] | None = None,
        executable_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        """Makes `executable`, the object that `execute` passes to its function."""
        self.executable = None
        if executable_cls is not None:
            args, kwargs = executable_args or (), executable_kwargs or {}
            self.executable = reused_process.call_reporting_failure(
                executable_cls, args, kwargs
            )

    def execute(self, func: Task, leave: bool = False) -> Any:
        """Calls `func(executable)` as a rank.

        The rank stays in the job after the call, unless `func` leaves the job or
        `leave` is true.
        """
        try:
            return reused_process.call_reporting_failure(func, (self.executable,))
        finally:
            if leave:
                lifecycle.shutdown()
