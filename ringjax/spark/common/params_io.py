"""Saves and loads estimators and models as Spark ML does, with their Params.

The values of Params are pickled into the text file of Spark ML. Do not load a file from
a place where other users can write, because loading runs code in the file.
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

_NOT_SAVED = ("backend", "store")  # Params that another cluster cannot use


class HorovodParamsWriter(MLWriter):
    """Writes an estimator or a model."""

    def __init__(self, instance: PersistentParams) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802  (Spark ML's name)
        """Writes the instance to a path of Spark."""
        values = {
            param.name: base64.b64encode(cloudpickle.dumps(value)).decode()
            for param, value in self.instance._paramMap.items()
            if param.name not in _NOT_SAVED and value is not None
        }
        # Leave the defaults out: JSON cannot express some defaults, and the class
        # defines all of them.
        copy = self.instance.copy()
        copy._defaultParamMap = {}
        DefaultParamsWriter.saveMetadata(copy, path, self.sparkSession, paramMap=values)


class HorovodParamsReader(MLReader):
    """Reads an estimator or a model that `HorovodParamsWriter` wrote."""

    def __init__(self, cls: type[PersistentParams]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """Returns the estimator or model at a path of Spark."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        found = self._cls()
        found._resetUid(metadata["uid"])
        values = metadata["paramMap"].items()
        pickled = {name: base64.b64decode(text) for name, text in values}
        return found._set(**found._unpickle(pickled))


class PersistentParams(MLWritable, MLReadable):
    """Adds `save`, `write`, `load` and `read` to a class with Params."""

    def write(self) -> HorovodParamsWriter:
        """Returns a writer: `.write().overwrite().save(path)`."""
        return HorovodParamsWriter(self)

    def _unpickle(self, values: dict[str, bytes]) -> dict[str, Any]:
        return {name: cloudpickle.loads(value) for name, value in values.items()}

    @classmethod
    def read(cls) -> HorovodParamsReader:
        """Returns a reader: `.read().load(path)`."""
        return HorovodParamsReader(cls)
