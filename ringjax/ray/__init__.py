"""Jobs on a cluster of Ray: `run`, a backend for Ray Train, and Horovod's executors.

Ray places and starts processes; ringjax's coordinator, in the driver, only decides who
belongs to the job. Needs the extra `ray`; nothing of Ray is imported before it is used.

Example:
    >>> import ringjax.ray
    >>> ringjax.ray.run(train, num_workers=(2, 8))  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringjax.ray.elastic import ElasticRayExecutor as ElasticRayExecutor
    from ringjax.ray.jobs import run as run
    from ringjax.ray.runner import RayExecutor as RayExecutor
    from ringjax.ray.train import RingConfig as RingConfig
    from ringjax.ray.train import report as report
    from ringjax.ray.worker import BaseHorovodWorker as BaseHorovodWorker

_HOMES = {
    "run": "jobs",
    "RingConfig": "train",
    "report": "train",
    "RayExecutor": "runner",
    "ElasticRayExecutor": "elastic",
    "BaseHorovodWorker": "worker",
}

__all__ = [
    "BaseHorovodWorker",
    "ElasticRayExecutor",
    "RayExecutor",
    "RingConfig",
    "report",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ImportError(
            "ringjax.ray needs Ray: pip install 'ringjax[ray]'", name="ray"
        ) from error
    return getattr(home, name)
