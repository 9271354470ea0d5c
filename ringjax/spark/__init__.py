"""Jobs on Spark: `Distributor`, and Horovod's `run` and `run_elastic`.

Spark places the tasks and repeats failed tasks, and each task starts its rank as a
process. The driver runs ringjax's rendezvous or coordinator, through which the ranks
find each other. The package needs the extra `spark`, and imports Spark when it is first
used.

Example:
    >>> from ringjax.spark import Distributor
    >>> Distributor(num_processes=4).run(train, epochs=3)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringjax.spark.distributor import Distributor as Distributor
    from ringjax.spark.distributor import HorovodRunner as HorovodRunner
    from ringjax.spark.jobs import run as run
    from ringjax.spark.jobs import run_elastic as run_elastic

_MODULES = {
    "Distributor": "distributor",
    "HorovodRunner": "distributor",
    "run": "jobs",
    "run_elastic": "jobs",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if error.name not in ("pyspark", "pyarrow"):
            raise
        raise ImportError(
            "ringjax.spark needs Spark: pip install 'ringjax[spark]'", name=error.name
        ) from error
    return getattr(module, name)
