"""What the two kinds of `RayExecutor`, static and elastic, have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_DEFAULTS = {
    "timeout_s": 30,
    "placement_group_timeout_s": 100,
    "nics": None,
    "discovery": None,
    "cooldown_range": None,
}


def get_setting(settings: Any, name: str) -> Any:
    """One of the settings, which may be of a class that does not know all."""
    return getattr(settings, name, _DEFAULTS[name])


def settings_environment(settings: Any) -> dict[str, str]:
    """Settings as variables of ringjax."""
    found = {"RINGJAX_START_TIMEOUT": f"{get_setting(settings, 'timeout_s'):g}"}
    if get_setting(settings, "nics"):
        nics = ",".join(sorted(get_setting(settings, "nics")))
        found["RINGJAX_NETWORK_INTERFACES"] = nics
    return found


@dataclass
class BaseParams:
    """What a worker needs.

    Raises:
        ValueError: GPUs are counted but not used.
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
        """The same in Ray's words."""
        found = {"CPU": float(self.cpus_per_worker)}
        gpus = float(self.gpus_per_worker or 1)
        return found | ({"GPU": gpus} if self.use_gpu else {})


class Adapter:
    """Does the work of a `RayExecutor`: in the driver, or as an actor for a client.

    Args:
        settings: of `create_settings`.
        params: of the kind of job.
    """

    def __init__(self, settings: Any, params: Any) -> None:
        self.settings, self.params = settings, params
        self.workers: list[Any] = []

    def shutdown(self) -> None:
        """Ends what was started."""
