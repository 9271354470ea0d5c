"""Jobs on Spark: `Distributor`, and Horovod's `run` and `run_elastic`.

Spark places tasks and tries them again; each starts its rank as a process of its own.
ringjax's rendezvous or coordinator, in the driver, only brings them together. Needs the
extra `spark`; nothing of Spark is imported before it is used.

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

_HOMES = {
    "Distributor": "distributor",
    "HorovodRunner": "distributor",
    "run": "jobs",
    "run_elastic": "jobs",
}

__all__ = ["Distributor", "HorovodRunner", "run", "run_elastic"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name not in ("pyspark", "pyarrow"):
            raise
        raise ImportError(
            "ringjax.spark needs Spark: pip install 'ringjax[spark]'", name=error.name
        ) from error
    return getattr(home, name)
