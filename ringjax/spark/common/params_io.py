"""ML save and load for estimators and models: `save`, `write`, `load`, `read`.

Param values travel pickled, models by value, in the text file that Spark ML has for
them. A file from a place that others can write to is not to be loaded.
"""

from __future__ import annotations

import base64
from typing import Any

import cloudpickle
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

_NOT_SAVED = ("backend", "store")  # belong to a cluster, and are given anew


class HorovodParamsWriter(MLWriter):
    """Writes an estimator or a model."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802  (Spark ML's name)
        """Writes it to a path of Spark."""
        values = {
            param.name: base64.b64encode(cloudpickle.dumps(value)).decode()
            for param, value in self.instance._paramMap.items()
            if param.name not in _NOT_SAVED and value is not None
        }
        # Defaults that cannot be JSON would be in the way, and are in the class.
        plain = self.instance.copy()
        plain._defaultParamMap = {}
        DefaultParamsWriter.saveMetadata(
            plain, path, self.sparkSession, paramMap=values
        )


class HorovodParamsReader(MLReader):
    """Reads what `HorovodParamsWriter` wrote."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """The estimator or model that was written to a path."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        found = self._cls()
        found._resetUid(metadata["uid"])
        values = metadata["paramMap"].items()
        pickled = {name: base64.b64decode(text) for name, text in values}
        return found._set(**found._unpickled(pickled))


class PersistentParams(MLWritable, MLReadable):
    """Has `save`, `write`, `load` and `read`."""

    def write(self) -> Any:
        """Writes it: `.write().overwrite().save(path)`."""
        return HorovodParamsWriter(self)

    def _unpickled(self, values: dict[str, bytes]) -> dict[str, Any]:
        """The values of Params that were saved."""
        return {name: cloudpickle.loads(value) for name, value in values.items()}

    @classmethod
    def read(cls) -> Any:
        """Reads one: `.read().load(path)`."""
        return HorovodParamsReader(cls)
