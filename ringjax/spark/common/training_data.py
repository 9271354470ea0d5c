"""A DataFrame as Parquet files in a store, and what is known about its columns.

Files are written once for a DataFrame: a second `fit` on it finds them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.ml.linalg import DenseVector, VectorUDT
from pyspark.sql.types import BooleanType

from ringjax.spark.common import constants
from ringjax.spark.common.parquet_rows import ParquetRows

Metadata = dict[str, dict[str, Any]]


Properties = tuple[int, int, Metadata, float]


@dataclass
class _CachedDataset:
    """A DataFrame's files: their number in the store, and what they are of."""

    index: int
    frame: Any
    columns: set[str]
    properties: Properties
    users: int = 0


class TrainingDataCache:
    """Which DataFrames are in which store."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._known: dict[tuple[Any, ...], _CachedDataset] = {}

    @contextlib.contextmanager
    def use(
        self,
        frame: Any,
        columns: set[str],
        store: Any,
        validation: float | str | None,
        seed: int | None,
        write: Callable[[int], Properties],
    ) -> Iterator[int]:
        """The number of a DataFrame's files, which are written if they are not there.

        Args:
            frame, columns, validation, seed: what they are of.
            store: where they are.
            write: writes them under a number; what is known of them then.
        """
        with self.lock:
            key = (id(frame), store.get_train_data_path(), validation, seed)
            found = self._known.get(key)
            if (
                found is None
                or not columns <= found.columns
                or not store.exists(store.get_train_data_path(found.index))
            ):
                # Numbers that nobody uses are given again.
                taken = {p.index for p in self._known.values() if p.users}
                index = next(i for i in range(len(taken) + 1) if i not in taken)
                known = self._known.items()
                self._known = {k: p for k, p in known if p.index != index}
                found = _CachedDataset(index, frame, columns, write(index))
                self._known[key] = found
            found.users += 1
        try:
            yield found.index
        finally:
            with self.lock:
                found.users -= 1

    def properties(self, index: int) -> Properties:
        """Training rows, validation rows, metadata, bytes of a row.

        Raises:
            KeyError: no such number.
        """
        for known in self._known.values():
            if known.index == index:
                return known.properties
        raise KeyError(index)

    def clear(self) -> None:
        """Forgets all."""
        with self.lock:
            self._known.clear()


_training_cache = TrainingDataCache()


def clear_training_cache() -> None:
    """Has the next `fit` on any DataFrame write its files anew."""
    _training_cache.clear()


def get_dataset_properties(dataset_idx: int) -> Properties:
    """Training rows, validation rows, metadata of the columns, bytes of a row."""
    return _training_cache.properties(dataset_idx)


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: Any,
    df: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None,
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
    seed: int | None = None,
) -> Iterator[int]:
    """Writes a DataFrame's columns to a store, if they are not there.

    Args:
        num_processes, partitions_per_process: so many files at most.
        store: where to.
        df: the DataFrame.
        label_columns, feature_columns, sample_weight_col: what is written of it; None
            as features: all but the labels.
        validation: a fraction, or a column: rows where it is true, or greater than 0.
        compress_sparse: without effect: sparse vectors stay what they are.
        verbose: tells where they are written to.
        seed: of the fraction.

    Yields:
        The number of the files in the store, see `get_dataset_properties`.

    Raises:
        ValueError: there is no such column, or there are no rows.
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
            *(store, label_columns, features, sample_weight_col, number),
            schema=df.schema,
            validates=frames[1] is not None,
        )

    use = _training_cache.use(df, set(names), store, validation, seed, write)
    with use as number:
        yield number


def get_simple_meta_from_parquet(
    store: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    sample_weight_col: str | None = None,
    dataset_idx: int | None = None,
    schema: Any = None,
    validates: bool = True,
) -> Properties:
    """Training rows, validation rows, metadata of the columns, bytes of a row.

    Raises:
        ValueError: there are no rows, or no such column.
    """
    path = store.get_train_data_path(dataset_idx)
    if not store.exists(path):
        raise ValueError(f"{path} does not exist in the store")
    names = [*feature_columns, *label_columns, *filter(None, [sample_weight_col])]
    _check_columns(names, store.get_parquet_dataset(path).schema.names)
    rows = ParquetRows.of(store, path, names)
    if not rows.count:
        raise ValueError(f"no rows in {path}")
    path = store.get_val_data_path(dataset_idx)
    validation_rows = 0
    if validates and store.exists(path):
        validation_rows = ParquetRows.of(store, path, names).count
        if not validation_rows and dataset_idx is not None:
            raise ValueError("there are no rows for validation")
    first = next(rows.batches(0, 1, 1)).columns
    types = {} if schema is None else {f.name: f.dataType for f in schema.fields}
    metadata = {n: _column_metadata(types.get(n), first[n]) for n in names}
    return rows.count, validation_rows, metadata, rows.row_size


def _column_metadata(kind: Any, row: Any) -> dict[str, Any]:
    size = int(row[0].size) if hasattr(row[0], "size") else 1
    vector = isinstance(kind, VectorUDT) or (kind is None and row.ndim > 1)
    if kind is None and not vector:
        import pyarrow as pa
        from pyspark.sql.pandas.types import from_arrow_type

        kind = from_arrow_type(pa.array(row).type)
    return {
        "spark_data_type": DenseVector if vector else type(kind),
        "is_sparse_vector_only": False,
        "shape": size,
        "intermediate_format": constants.NOCHANGE,
        "max_size": size,
    }


def _check_columns(names: Sequence[str], there: Sequence[str]) -> None:
    missing = [name for name in names if name not in there]
    if missing:
        raise ValueError(
            f"no column {', '.join(missing)}; there are {', '.join(there)}"
        )


def check_validation(validation: float | str | None, df: Any = None) -> None:
    """Whether it is a fraction, or a column of the DataFrame.

    Raises:
        ValueError: it is not.
    """
    if isinstance(validation, str):
        if df is not None:
            _check_columns([validation], df.columns)
    elif validation and not (isinstance(validation, float) and 0 <= validation < 1):
        raise ValueError(
            f"validation is {validation!r}: expected a fraction below 1, or a column"
        )


def _train_val_split(
    df: Any, validation: float | str | None, seed: int | None = None
) -> tuple[Any, Any, float]:
    """Rows for training, for validation, and the fraction of these, if it is known."""
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
