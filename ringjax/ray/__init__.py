"""Jobs on a cluster of Ray: `run`, a backend for Ray Train, and Horovod's executors.

Ray places and starts processes. The coordinator of ringjax, in the driver, decides
which processes are members of the job. The package needs the extra `ray`, and imports
Ray at the first access to one of its names.

Example:
    >>> import ringjax.ray
    >>> ringjax.ray.run(train, num_workers=(2, 8))  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringjax.ray.elastic import ElasticRayExecutor as ElasticRayExecutor
    from ringjax.ray.executor import RayExecutor as RayExecutor
    from ringjax.ray.jobs import run as run
    from ringjax.ray.train import RingConfig as RingConfig
    from ringjax.ray.train import report as report
    from ringjax.ray.worker import BaseHorovodWorker as BaseHorovodWorker

_MODULES = {
    "run": "jobs",
    "RingConfig": "train",
    "report": "train",
    "RayExecutor": "executor",
    "ElasticRayExecutor": "elastic",
    "BaseHorovodWorker": "worker",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ImportError(
            "ringjax.ray needs Ray: pip install 'ringjax[ray]'", name="ray"
        ) from error
    return getattr(module, name)
