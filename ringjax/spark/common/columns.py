"""Compares columns with a model's inputs and outputs, and describes columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT
from pyspark.sql import DataFrame, Row
from pyspark.sql.types import StructField, StructType

from ringjax.spark.common import constants

T = TypeVar("T")
Metadata: TypeAlias = dict[str, dict[str, Any]]
"""Horovod's description of each column, by the name of the column."""

Shapes: TypeAlias = Sequence[Sequence[int]]
Sizes: TypeAlias = tuple[set[type], set[int], set[int]]
"""The Python types of values, their lengths, and their numbers of stored elements."""


def to_list(var: list[T] | tuple[T, ...] | T | None, length: int) -> list[T] | None:
    """Returns a list of `length` values from one common value, or from one for each.

    Raises:
        ValueError: the number of values is neither 1 nor `length`.

    Example:
        >>> to_list("mse", 2)
        ['mse', 'mse']
    """
    if var is None:
        return None
    found = list(var) if isinstance(var, list | tuple) else [var]
    found = found * length if len(found) == 1 else found
    if len(found) != length:
        raise ValueError(f"{found!r}: {len(found)} given, expected {length}")
    return found


def check_shape_compatibility(
    metadata: Metadata,
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    input_shapes: Shapes | None = None,
    output_shapes: Shapes | None = None,
    label_shapes: Shapes | None = None,
) -> None:
    """Checks that the rows of each column have the size of the input, output or label.

    Raises:
        ValueError: the rows of a column have another size.
    """
    for columns, shapes, what in (
        (feature_columns, input_shapes, "the model's input"),
        (label_columns, label_shapes or output_shapes, "the label or output"),
    ):
        if shapes is None:
            continue
        if len(columns) != len(shapes):
            raise ValueError(
                f"{len(columns)} columns ({', '.join(columns)}), but {len(shapes)} "
                f"shapes of {what}"
            )
        for column, shape in zip(columns, shapes, strict=True):
            size, expected = metadata[column]["shape"], abs(math.prod(shape))
            if size is not None and size != expected:
                raise ValueError(
                    f"column {column} has {size} values in a row, but {what} has "
                    f"{expected}, as its shape is {list(shape)}"
                )


def get_spark_df_output_schema(
    input_df_schema: StructType,
    label_cols: Sequence[str],
    output_cols: Sequence[str],
    metadata: Metadata,
    vectors: Sequence[bool] | None = None,
) -> StructType:
    """Adds prediction columns, with the types of the labels, to a DataFrame's schema.

    Args:
        input_df_schema: the schema without predictions.
        label_cols, output_cols: the columns of labels and of their predictions.
        metadata: the metadata of the labels.
        vectors: for each output, whether it has several values. An output with several
            values becomes a vector for every type of its label.

    Raises:
        ValueError: an output column exists already, or the numbers of columns differ.
    """
    if len(label_cols) != len(output_cols):
        raise ValueError(f"{len(output_cols)} output columns for {len(label_cols)}")
    existing = set(input_df_schema.names) & set(output_cols)
    if existing:
        raise ValueError(
            f"column {', '.join(existing)} is there already: setOutputCols"
        )
    fields = list(input_df_schema.fields)
    for i, (label, output) in enumerate(zip(label_cols, output_cols, strict=True)):
        kind = metadata[label]["spark_data_type"]
        several = vectors is not None and vectors[i]
        if several or kind in (DenseVector, SparseVector) or kind.typeName() == "array":
            kind = VectorUDT
        fields.append(StructField(output, kind(), True))
    return StructType(fields)


def _get_col_info(
    df: DataFrame,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns Python types, shapes and sizes of all columns; reads every row."""

    def value_sizes(value: object) -> Sizes:
        shape = size = 1
        if isinstance(value, SparseVector):
            shape, size = value.size, len(value.indices)
        elif isinstance(value, DenseVector | list):
            shape = size = len(value)
        return {type(value)}, {shape}, {size}

    def row_sizes(row: Row) -> list[tuple[str, Sizes]]:
        return [(name, value_sizes(value)) for name, value in row.asDict().items()]

    def merge(a: Sizes, b: Sizes) -> Sizes:
        shapes, sizes = a[1] | b[1], a[2] | b[2]
        return a[0] | b[0], {min(shapes), max(shapes)}, {min(sizes), max(sizes)}

    found = dict(df.rdd.flatMap(row_sizes).reduceByKey(merge).collect())
    for name, (types, shapes, sizes) in found.items():
        if len(shapes) > 1 or (len(sizes) > 1 and SparseVector not in types):
            raise ValueError(
                f"column {name}: rows have {min(shapes)} to {max(shapes)} values; "
                "expected equally many in all rows"
            )
    return (
        {name: types for name, (types, _, _) in found.items()},
        {name: max(shapes) for name, (_, shapes, _) in found.items()},
        {name: max(sizes) for name, (_, _, sizes) in found.items()},
    )


def _get_metadata(df: DataFrame) -> Metadata:
    """Returns Horovod's metadata of each column; reads every row."""
    types, shapes, sizes = _get_col_info(df)
    found = {}
    for field in df.schema.fields:
        dense, sparse = (
            kind in types[field.name] for kind in (DenseVector, SparseVector)
        )
        kind, how = type(field.dataType), constants.NOCHANGE
        if dense:
            kind, how = DenseVector, constants.ARRAY
        elif sparse:
            kind, how = SparseVector, constants.CUSTOM_SPARSE
        found[field.name] = {
            "spark_data_type": kind,
            "is_sparse_vector_only": sparse and not dense,
            "shape": shapes[field.name],
            "intermediate_format": how,
            "max_size": sizes[field.name],
        }
    return found
