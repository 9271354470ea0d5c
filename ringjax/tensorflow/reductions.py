"""Horovod's reductions of TensorFlow's tensors: allreduce and reducescatter.

Differences to Horovod 0.28: bool, bfloat16 and complex numbers work, and scaling
factors keep the precision of float64. operations.py runs the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tensorflow as tf

from ringjax.eager import lane
from ringjax.ops import Adasum, Average, Sum
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.collective_spec import CollectiveSpec
from ringjax.tensorflow.compression import Compression, Compressor
from ringjax.tensorflow.operations import (
    make_spec,
    read_rank_info,
    reduction_options,
    run_allgather,
    run_allreduce,
    run_compressed,
    run_reducescatter,
)
from ringjax.tensorflow.tf_types import TensorLike
from ringjax.world.process_set import ProcessSet, global_process_set


@do_not_convert
def allreduce(
    tensor: TensorLike | tf.IndexedSlices,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> tf.Tensor | tf.IndexedSlices:
    """Returns the reduction of the tensors of all ranks.

    The derivative is the allreduce of the gradients, with the same op and factors.

    Args:
        tensor: a tensor or variable of the same dtype and shape on all ranks, or
            `tf.IndexedSlices`, whose result has the entries of all ranks.
        average: deprecated; True means op=Average, False means op=Sum.
        device_dense, device_sparse: arguments of Horovod without effect.
        compression: the representation on the wire, see `Compression`.
        op: Average (if None), Sum, Min, Max, Product or Adasum. Sums of integers wrap
            around in their own dtype, also the sums that Average divides.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        name: the name of the operation on all ranks; ranks may submit named operations
            in any order. If it is None, the operation is numbered in the order of the
            calls, or in a graph named after its tensor.
        process_set: the ranks that take part; this rank must be among them.
        ignore_name_scope: whether a graph uses `name` without the scope around it.

    Raises:
        tf.errors.FailedPreconditionError: the ranks disagree about dtype, shape or op.
            All ranks raise it.
        tf.errors.InvalidArgumentError: an argument is wrong; nothing was sent.
        tf.errors.UnknownError: a rank is lost. Outside of graphs these three errors are
            also HorovodInternalError or ValueError.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allreduce(tf.constant([1.0, 2.0]), name="loss").numpy().tolist()
        [1.0, 2.0]
    """
    del device_dense, device_sparse
    options = reduction_options(
        "allreduce", average, op, prescale_factor, postscale_factor
    )
    call = make_spec("allreduce", name, process_set, ignore_name_scope, **options)
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(tensor, call)
    return run_compressed(run_allreduce, call, [tensor], compression)[0]


def _allreduce_slices(slices: tf.IndexedSlices, call: CollectiveSpec) -> object:
    """Gathers the entries of all ranks and scales the values."""
    if call.reduce_op not in (Average, Sum):
        advice = "; sparse_as_dense=True makes them dense"
        raise NotImplementedError(
            f"{lane.title('allreduce', call.name)}: tf.IndexedSlices can be averaged "
            f"and added up only{advice if call.reduce_op == Adasum else ''}"
        )
    parts = [tf.convert_to_tensor(slices.values), tf.convert_to_tensor(slices.indices)]
    name = f"{call.name}.sparse" if call.name else ""
    values, indices = run_allgather(replace(call, op="allgather", name=name), parts)
    factor = call.prescale * call.postscale
    if call.reduce_op == Average:
        size = read_rank_info("size", call.process_set_id)
        values = values / tf.cast(size, values.dtype)
    if factor != 1.0:
        values = values * tf.cast(factor, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


@do_not_convert
def grouped_allreduce(
    tensors: Sequence[TensorLike | tf.IndexedSlices],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduces several tensors as one operation.

    The tensors may differ in dtype and shape. If one tensor is `tf.IndexedSlices`, each
    tensor is reduced by an operation of its own.

    Args, Raises: as `allreduce`.

    Returns:
        A list of the results.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> [int(x) for x in hvd.grouped_allreduce([1, 2], op=hvd.Max)]
        [1, 2]
    """
    if not tensors:
        return []
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        return [
            allreduce(
                tensor,
                average,
                compression=compression,
                op=op,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                name=f"{name}.{i}" if name else None,
                process_set=process_set,
                ignore_name_scope=ignore_name_scope,
            )
            for i, tensor in enumerate(tensors)
        ]
    options = reduction_options(
        "allreduce", average, op, prescale_factor, postscale_factor
    )
    call = make_spec("allreduce", name, process_set, ignore_name_scope, **options)
    return run_compressed(run_allreduce, call, tensors, compression)


@do_not_convert
def reducescatter(
    tensor: TensorLike,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a tensor over all ranks and returns this rank's part of the rows.

    If the rows cannot be divided evenly, the first ranks receive one row more. The
    derivative is the allgather of the gradients, times the factors, and for Sum also
    times the number of ranks.

    Args, Raises: as `allreduce`; the tensor has at least one dimension.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.reducescatter(tf.ones([4, 2])).shape[0] * hvd.size()
        4
    """
    del device_dense
    options = reduction_options(
        "reducescatter", None, op, prescale_factor, postscale_factor
    )
    call = make_spec("reducescatter", name, process_set, ignore_name_scope, **options)
    return run_compressed(run_reducescatter, call, [tensor], compression)[0]


@do_not_convert
def grouped_reducescatter(
    tensors: Sequence[TensorLike],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Runs `reducescatter` of several tensors as one operation; returns a list."""
    del device_dense
    options = reduction_options(
        "reducescatter", None, op, prescale_factor, postscale_factor
    )
    if not tensors:
        return []
    call = make_spec("reducescatter", name, process_set, ignore_name_scope, **options)
    return run_compressed(run_reducescatter, call, tensors, compression)
