"""Writes a DataFrame as Parquet files to a store, with metadata of its columns.

The files of a DataFrame are written once. A second `fit` on the DataFrame reuses them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pyspark.ml.linalg import DenseVector, VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql.types import BooleanType, DataType, StructType

from ringjax.spark.common import constants
from ringjax.spark.common.columns import Metadata
from ringjax.spark.common.parquet_rows import Array, ParquetRows
from ringjax.spark.common.store import FilesystemStore

Properties: TypeAlias = tuple[int, int, Metadata, float]
"""Rows for training, rows for validation, metadata, and mean bytes of a row."""


@dataclass
class _CachedDataset:
    """The Parquet files of a DataFrame in a store.

    Attributes:
        index: the index of the files in the store.
        frame: the DataFrame. The cache finds a DataFrame by its id, and this reference
            ensures that no other DataFrame has the same id.
        users: the number of calls of `fit` that use the files now.
    """

    index: int
    frame: DataFrame
    columns: set[str]
    properties: Properties
    users: int = 0


class TrainingDataCache:
    """Remembers which DataFrames have files in which store."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._datasets: dict[tuple[Any, ...], _CachedDataset] = {}

    @contextlib.contextmanager
    def use(
        self,
        frame: DataFrame,
        columns: set[str],
        store: FilesystemStore,
        *,
        validation: float | str | None,
        seed: int | None,
        write: Callable[[int], Properties],
    ) -> Iterator[int]:
        """Yields the index of a DataFrame's files; writes the files first if necessary.

        `write` writes the files under an index, and returns their properties. All other
        arguments identify the files.
        """
        # The lock is held while files are written, so that two threads that fit on one
        # DataFrame do not write the same files.
        with self.lock:
            key = (id(frame), store.get_train_data_path(), validation, seed)
            found = self._datasets.get(key)
            if (
                found is None
                or not columns <= found.columns
                or not store.exists(store.get_train_data_path(found.index))
            ):
                # Reuse the index of old files that no `fit` uses now, so that the new
                # files replace the old files in the store.
                used = {d.index for d in self._datasets.values() if d.users}
                index = next(i for i in range(len(used) + 1) if i not in used)
                self._datasets = {
                    k: d for k, d in self._datasets.items() if d.index != index
                }
                found = _CachedDataset(index, frame, columns, write(index))
                self._datasets[key] = found
            found.users += 1
        try:
            yield found.index
        finally:
            with self.lock:
                found.users -= 1

    def properties(self, index: int) -> Properties:
        """Returns the properties of the files with this index."""
        for dataset in self._datasets.values():
            if dataset.index == index:
                return dataset.properties
        raise KeyError(index)

    def clear(self) -> None:
        """Empties the cache; the files stay in the store until they are replaced."""
        with self.lock:
            self._datasets.clear()


_training_cache = TrainingDataCache()


def clear_training_cache() -> None:
    """Makes the next `fit` on any DataFrame write its files again."""
    _training_cache.clear()


def get_dataset_properties(dataset_idx: int) -> Properties:
    """Returns the training and validation row counts, metadata, and bytes per row."""
    return _training_cache.properties(dataset_idx)


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: FilesystemStore,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None,
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
    seed: int | None = None,
) -> Iterator[int]:
    """Writes a DataFrame's columns to a store, unless the store has them already.

    Args:
        num_processes, partitions_per_process: their product is the largest number of
            files.
        store: receives the files.
        df: the DataFrame.
        label_columns, feature_columns, sample_weight_col: the columns to write;
            `feature_columns` None: all columns except for the labels.
        validation: the fraction of rows for validation, or the column that is true or
            positive in these rows.
        compress_sparse: an argument without effect; sparse vectors stay sparse.
        verbose: whether the path is printed.
        seed: the seed of the random split.

    Yields:
        The index of the files in the store, see `get_dataset_properties`.

    Raises:
        ValueError: a column does not exist, or there are no rows.
    """
    check_validation(validation, df)
    if num_processes < 1 or partitions_per_process < 1:
        raise ValueError(
            f"num_proc={num_processes}, partitions_per_process="
            f"{partitions_per_process}: expected at least 1"
        )
    if not label_columns:
        raise ValueError("label_cols must be given")
    others = [name for name in df.columns if name not in (*label_columns, validation)]
    features = others if feature_columns is None else list(feature_columns)
    names = list(dict.fromkeys([*features, *label_columns]))
    if sample_weight_col:
        names.append(sample_weight_col)
    _check_columns(names, df.columns)

    def write(number: int) -> Properties:
        if verbose:
            print(f"writing to {store.get_train_data_path(number)}")
        part = df.select([*names, *([validation] * isinstance(validation, str))])
        frames = _train_val_split(part, validation, seed)[:2]
        paths = store.get_train_data_path, store.get_val_data_path
        for frame, path in zip(frames, paths, strict=True):
            if frame is not None:
                files = frame.coalesce(num_processes * partitions_per_process)
                files.write.mode("overwrite").parquet(path(number))
        return get_simple_meta_from_parquet(
            store,
            label_columns,
            features,
            sample_weight_col,
            number,
            schema=df.schema,
            validates=frames[1] is not None,
        )

    with _training_cache.use(
        df, set(names), store, validation=validation, seed=seed, write=write
    ) as number:
        yield number


def get_simple_meta_from_parquet(
    store: FilesystemStore,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    sample_weight_col: str | None = None,
    dataset_idx: int | None = None,
    *,
    schema: StructType | None = None,
    validates: bool = True,
) -> Properties:
    """Returns the properties of Parquet files in a store.

    Args:
        store: has the files.
        label_columns, feature_columns, sample_weight_col: the columns of interest.
        dataset_idx: the index of the files; None means files that the user has written.
        schema: the schema of the DataFrame. If it is None, it is derived from the
            files.
        validates: whether there is a validation.

    Raises:
        ValueError: there are no rows, or a column does not exist.
    """
    path = store.get_train_data_path(dataset_idx)
    if not store.exists(path):
        raise ValueError(f"{path} does not exist in the store")
    names = [*feature_columns, *label_columns, *filter(None, [sample_weight_col])]
    _check_columns(names, store.get_parquet_dataset(path).schema.names)
    rows = ParquetRows.scan(store, path, names)
    if not rows.count:
        raise ValueError(f"no rows in {path}")
    path = store.get_val_data_path(dataset_idx)
    validation_rows = 0
    if validates and store.exists(path):
        validation_rows = ParquetRows.scan(store, path, names).count
        if not validation_rows and dataset_idx is not None:
            raise ValueError("there are no rows for validation")
    first = next(rows.batches(0, 1, 1)).columns
    types = {} if schema is None else {f.name: f.dataType for f in schema.fields}
    metadata = {n: _column_metadata(types.get(n), first[n]) for n in names}
    return rows.count, validation_rows, metadata, rows.row_size


def _column_metadata(kind: DataType | None, rows: Array) -> dict[str, Any]:
    """Returns the metadata of a column from its type, if known, and its first row."""
    size = int(rows[0].size) if hasattr(rows[0], "size") else 1
    vector = isinstance(kind, VectorUDT) or (kind is None and rows.ndim > 1)
    if kind is None and not vector:
        import pyarrow as pa
        from pyspark.sql.pandas.types import from_arrow_type

        kind = from_arrow_type(pa.array(rows).type)
    return {
        "spark_data_type": DenseVector if vector else type(kind),
        "is_sparse_vector_only": False,
        "shape": size,
        "intermediate_format": constants.NOCHANGE,
        "max_size": size,
    }


def _check_columns(names: Sequence[str], columns: Sequence[str]) -> None:
    missing = [name for name in names if name not in columns]
    if missing:
        raise ValueError(
            f"no column {', '.join(missing)}; there are {', '.join(columns)}"
        )


def check_validation(
    validation: float | str | None, df: DataFrame | None = None
) -> None:
    """Checks that `validation` is a fraction, or a column of the DataFrame."""
    if isinstance(validation, str):
        if df is not None:
            _check_columns([validation], df.columns)
    elif validation and not (isinstance(validation, float) and 0 <= validation < 1):
        raise ValueError(
            f"validation is {validation!r}: expected a fraction below 1, or a column"
        )


def _train_val_split(
    df: DataFrame, validation: float | str | None, seed: int | None = None
) -> tuple[DataFrame, DataFrame | None, float]:
    """Returns the rows for training and for validation, and the validation fraction.

    If a column selects the rows for validation, the fraction is unknown and is 0.
    """
    if not validation:
        return df, None, 0.0
    if not isinstance(validation, str):
        train, val = df.randomSplit([1.0 - validation, validation], seed)
        return train, val, validation
    column = df[validation]
    if not isinstance(df.schema[validation].dataType, BooleanType):
        column = column > 0
    val, train = df.filter(column), df.filter(~column)
    return train.drop(validation), val.drop(validation), 0.0
