"""Horovod's reductions of TensorFlow's tensors: allreduce and reducescatter.

Differences to Horovod 0.28: bool, bfloat16 and complex numbers work; scaling factors
keep float64's precision. How they run is in operations.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringjax.eager import lane
from ringjax.ops import Adasum, Average, Sum
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.compression import Compression
from ringjax.tensorflow.operations import (
    read_rank_info,
    reduction_options,
    run_allgather,
    run_allreduce,
    run_compressed,
    run_reducescatter,
)
from ringjax.world.process_set import ProcessSet, global_process_set


@do_not_convert
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Returns the reduction of all ranks' tensors.

    Args:
        tensor: a tensor or variable of the same dtype and shape on all ranks, or
            `tf.IndexedSlices`, whose entries are put side by side.
        average: deprecated; True is op=Average, False is op=Sum.
        device_dense, device_sparse: accepted for Horovod's sake.
        compression: what it travels as, see `Compression`.
        op: Average (if None), Sum, Min, Max, Product or Adasum. Sums of integers wrap
            around in their own dtype, also those that Average then divides.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        name: what the operation is called on all ranks; ranks may submit their names in
            any order. None gives it a number, in the order of the calls, or in a graph
            a name after its tensor.
        process_set: the ranks that take part; this rank must be one of them.
        ignore_name_scope: in a graph, leave `name` as it is.

    Raises:
        tf.errors.FailedPreconditionError: the ranks disagree about dtype, shape or op;
            on all of them.
        tf.errors.InvalidArgumentError: a bad argument; nothing was sent.
        tf.errors.UnknownError: a rank is gone. Outside of graphs all three are
            HorovodInternalError or ValueError, too.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allreduce(tf.constant([1.0, 2.0]), name="loss").numpy().tolist()
        [1.0, 2.0]

    Derivatives: the allreduce of the gradients, with the same op and factors.
    """
    del device_dense, device_sparse
    how = reduction_options("allreduce", average, op, prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        return _side_by_side(tensor, name, process_set, ignore_name_scope, how)

    def go(tensors: Sequence[Any]) -> Sequence[Any]:
        return run_allreduce(tensors, name, process_set, ignore_name_scope, how)

    return run_compressed([tensor], compression, go)[0]


def _side_by_side(
    slices: tf.IndexedSlices,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    how: dict[str, Any],
) -> tf.IndexedSlices:
    """The entries of all ranks, together."""
    if how["reduce_op"] not in (Average, Sum):
        advice = "; sparse_as_dense=True makes them dense"
        raise NotImplementedError(
            f"{lane.title('allreduce', name)}: tf.IndexedSlices can be averaged and "
            f"added up only{advice if how['reduce_op'] == Adasum else ''}"
        )
    parts = [tf.convert_to_tensor(slices.values), tf.convert_to_tensor(slices.indices)]
    values, indices = run_allgather(
        parts, f"{name}.sparse" if name else None, process_set, ignore_name_scope
    )
    factor = how["prescale"] * how["postscale"]
    if how["reduce_op"] == Average:
        size = read_rank_info("size", process_set.process_set_id or 0)
        values = values / tf.cast(size, values.dtype)
    if factor != 1.0:
        values = values * tf.cast(factor, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


@do_not_convert
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """`allreduce` of several tensors as one operation; returns a list.

    They may differ in dtype and shape. `tf.IndexedSlices` are reduced one by one.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> [int(x) for x in hvd.grouped_allreduce([1, 2], op=hvd.Max)]
        [1, 2]
    """
    if not tensors:
        return []
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        how = (compression, op, prescale_factor, postscale_factor)
        names = [f"{name}.{i}" if name else None for i in range(len(tensors))]
        rest = (process_set, ignore_name_scope)
        return [
            allreduce(tensor, average, device_dense, device_sparse, *how, each, *rest)
            for tensor, each in zip(tensors, names, strict=True)
        ]
    call = reduction_options(
        "allreduce", average, op, prescale_factor, postscale_factor
    )

    def go(given: Sequence[Any]) -> Sequence[Any]:
        return run_allreduce(given, name, process_set, ignore_name_scope, call)

    return run_compressed(tensors, compression, go)


@do_not_convert
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """`allreduce` of which each rank gets only its share of the rows.

    If they cannot be divided evenly, the first ranks get one more.

    Args, Raises: as `allreduce`; the tensor is not 0-d.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.reducescatter(tf.ones([4, 2])).shape[0] * hvd.size()
        4

    Derivatives: the allgather of the gradients, times the factors, for Sum also times
    the ranks.
    """
    return grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        ignore_name_scope,
        prescale_factor,
        postscale_factor,
        name=name,
    )[0]


@do_not_convert
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    name: str | None = None,
) -> list[Any]:
    """`reducescatter` of several tensors as one operation; returns a list."""
    del device_dense
    how = reduction_options(
        "reducescatter", None, op, prescale_factor, postscale_factor
    )
    if not tensors:
        return []

    def go(given: Sequence[Any]) -> Sequence[Any]:
        return run_reducescatter(given, name, process_set, ignore_name_scope, how)

    return run_compressed(tensors, compression, go)
