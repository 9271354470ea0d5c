"""Adapter: the part of a `RayExecutor` that starts workers, for static or elastic jobs.

The module path is Horovod's. The module also reads Horovod's settings.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringjax.ray.ray_types import ActorHandle, ObjectRef, RayQueue, Result, Task

_DEFAULTS = {
    "timeout_s": 30,
    "placement_group_timeout_s": 100,
    "nics": None,
    "discovery": None,
    "cooldown_range": None,
}


def get_setting(settings: object, name: str) -> Any:
    """Returns an attribute of the settings, or its default if their class lacks it."""
    return getattr(settings, name, _DEFAULTS[name])


def settings_environment(settings: object) -> dict[str, str]:
    """Returns the environment variables that carry Horovod's settings to workers."""
    found = {"RINGJAX_START_TIMEOUT": f"{get_setting(settings, 'timeout_s'):g}"}
    if nics := get_setting(settings, "nics"):
        found["RINGJAX_NETWORK_INTERFACES"] = ",".join(sorted(nics))
    return found


@dataclass
class BaseParams:
    """The resources of a worker.

    Raises:
        ValueError: `gpus_per_worker` is set without `use_gpu`, or is not positive.
    """

    cpus_per_worker: float = 1
    use_gpu: bool = False
    gpus_per_worker: float | None = None

    def __post_init__(self) -> None:
        gpus = self.gpus_per_worker
        if gpus and not self.use_gpu:
            raise ValueError("gpus_per_worker is set, but use_gpu is False")
        if self.use_gpu and gpus is not None and gpus <= 0:
            raise ValueError(f"gpus_per_worker={gpus}: expected more than 0")

    def resources(self) -> dict[str, float]:
        """Returns the resources in Ray's format."""
        found = {"CPU": float(self.cpus_per_worker)}
        gpus = float(self.gpus_per_worker or 1)
        return found | ({"GPU": gpus} if self.use_gpu else {})


class Executable(NamedTuple):
    """The class of which each worker makes an object, and the class's arguments."""

    cls: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


class Adapter(abc.ABC):
    """Starts and ends the workers of a `RayExecutor`.

    An adapter is an object of the driver. For a client of a cluster, the adapter is an
    actor in the cluster. `workers` are the actors that stay between two calls.
    """

    def __init__(self, settings: object, params: Any) -> None:
        self.settings, self.params = settings, params
        self.workers: list[ActorHandle] = []

    @abc.abstractmethod
    def start(self, executable: Executable, env: Mapping[str, str]) -> None:
        """Starts workers with these environment variables, and their executables."""

    @abc.abstractmethod
    def execute(
        self, fn: Task, queue: RayQueue, on_poll: Callable[[], None]
    ) -> list[Result]:
        """Calls `fn(executable)` on all workers, and returns the results by rank."""

    @abc.abstractmethod
    def run_remote(self, fn: Task) -> list[ObjectRef]:
        """Calls `fn(executable)` on all workers, and immediately returns references."""

    @abc.abstractmethod
    def execute_single(self, fn: Task) -> Result:
        """Calls `fn(executable)` on rank 0, and returns the result."""

    def shutdown(self) -> None:  # noqa: B027  (not all adapters keep workers)
        """Ends the workers that have stayed after the last call."""
