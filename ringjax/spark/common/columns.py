"""Columns beside a model's inputs and outputs: do they fit, and what comes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT
from pyspark.sql.types import StructField, StructType

from ringjax.spark.common import constants

Shapes = Sequence[Sequence[int]]


def to_list(var: Any, length: int) -> list[Any] | None:
    """A list of so many, of one for all or of one for each.

    Raises:
        ValueError: there are more or fewer.

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
    metadata: dict[str, dict[str, Any]],
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    input_shapes: Shapes | None = None,
    output_shapes: Shapes | None = None,
    label_shapes: Shapes | None = None,
) -> None:
    """Whether columns have as many values in a row as inputs, outputs and labels.

    Raises:
        ValueError: a column has not.
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
    metadata: dict[str, dict[str, Any]],
    vectors: Sequence[bool] | None = None,
) -> StructType:
    """The schema of a DataFrame with predictions, each of the type of its label.

    Args:
        vectors: outputs of several values, which become vectors, whatever the label is.

    Raises:
        ValueError: a column is there already, or there are more than labels.
    """
    if len(label_cols) != len(output_cols):
        raise ValueError(f"{len(output_cols)} output columns for {len(label_cols)}")
    there = set(input_df_schema.names) & set(output_cols)
    if there:
        raise ValueError(f"column {', '.join(there)} is there already: setOutputCols")
    fields = list(input_df_schema.fields)
    for i, (label, output) in enumerate(zip(label_cols, output_cols, strict=True)):
        kind = metadata[label]["spark_data_type"]
        several = vectors is not None and vectors[i]
        if several or kind in (DenseVector, SparseVector) or kind.typeName() == "array":
            kind = VectorUDT
        fields.append(StructField(output, kind(), True))
    return StructType(fields)


def _get_col_info(df: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Python types, shapes and sizes of all columns; looks at every row.

    Raises:
        ValueError: the rows of a column differ.
    """

    def of_value(value: Any) -> tuple[set[type], set[int], set[int]]:
        shape = size = 1
        if isinstance(value, SparseVector):
            shape, size = value.size, len(value.indices)
        elif isinstance(value, DenseVector | list):
            shape = size = len(value)
        return {type(value)}, {shape}, {size}

    def of_row(row: Any) -> Any:
        return [(name, of_value(value)) for name, value in row.asDict().items()]

    def joined(a: Any, b: Any) -> Any:
        shapes, sizes = a[1] | b[1], a[2] | b[2]
        return a[0] | b[0], {min(shapes), max(shapes)}, {min(sizes), max(sizes)}

    found = dict(df.rdd.flatMap(of_row).reduceByKey(joined).collect())
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


def _get_metadata(df: Any) -> dict[str, dict[str, Any]]:
    """What Horovod knows of each column; looks at every row."""
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
