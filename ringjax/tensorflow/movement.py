"""Horovod's operations that move TensorFlow's tensors, and operations that only wait.

The module has allgather, broadcast and alltoall, join and barrier, and rank and size as
tensors. operations.py runs the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringjax.eager import lane
from ringjax.tensorflow import tf_private
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.operations import (
    RowCounts,
    Tensors,
    as_argument_error,
    average_gradients,
    make_spec,
    read_rank_info,
    run,
    run_allgather,
)
from ringjax.tensorflow.tf_types import Splits, TensorLike
from ringjax.tensorflow.variables import as_variable_list
from ringjax.world.process_set import ProcessSet, global_process_set


@do_not_convert
def allgather(
    tensor: TensorLike,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns the rows of the tensors of all ranks, in the order of the ranks.

    The derivative is, as in Horovod, this rank's rows of the average of all ranks'
    gradients.

    Args, Raises: as `allreduce`. The tensor has at least one dimension, and its number
    of rows may differ from rank to rank.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allgather(tf.constant([7])).numpy().tolist()
        [7]
    """
    call = make_spec("allgather", name, process_set, ignore_name_scope)
    return run_allgather(call, [tensor])[0]


@do_not_convert
def grouped_allgather(
    tensors: Sequence[TensorLike],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Runs `allgather` of several tensors as one operation; returns a list."""
    if not tensors:
        return []
    call = make_spec("allgather", name, process_set, ignore_name_scope)
    return list(run_allgather(call, tensors))


@do_not_convert
def broadcast(
    tensor: TensorLike,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns the tensor of `root_rank` on every rank.

    The derivative is, as in Horovod, the average of all ranks' gradients on the root,
    and zero on all other ranks.

    Args:
        tensor: the tensor, which is read on the root; its dtype and shape are the same
            on all ranks.
        root_rank: the root's rank in the world; the root is in the process set.
        name, ignore_name_scope, process_set: as for `allreduce`.

    Raises: as `allreduce`.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast(tf.range(3), root_rank=0).numpy().tolist()
        [0, 1, 2]
    """
    return broadcast_group([tensor], root_rank, name, ignore_name_scope, process_set)[0]


@do_not_convert
def broadcast_group(
    tensors: Sequence[TensorLike],
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Runs `broadcast` of several tensors as one operation, which Horovod lacks."""
    try:
        lane.root_in_set("broadcast", root_rank, process_set)
        call = make_spec(
            "broadcast", name, process_set, ignore_name_scope, root=int(root_rank)
        )
    except (ValueError, TypeError) as error:
        raise as_argument_error(error) from None

    def rule(gradients: Tensors, _: RowCounts) -> Tensors:
        means = average_gradients(gradients, process_set, ignore_name_scope)
        is_root = tf.equal(read_rank_info("rank"), root_rank)
        return [tf.where(is_root, mean, tf.zeros_like(mean)) for mean in means]

    return run(call, tensors, rule)[0]


@do_not_convert
def broadcast_(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Sets variables on every rank to their values on the root, as one operation.

    Args:
        variables: a list of `tf.Variable`, of the same dtypes and shapes on all ranks.
        root_rank, name, process_set: as for `broadcast`.

    Returns:
        The variables' new values.

    Raises: as `broadcast`.
    """
    variables = as_variable_list(variables)
    if not variables:
        return []
    written = assign_root_values(variables, root_rank, name, process_set)
    # A graph of TensorFlow 1 does not order reads after writes without this dependency.
    with tf.control_dependencies([] if tf_private.executing_eagerly() else written):
        return [variable.read_value() for variable in variables]


def assign_root_values(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    """Assigns the root's values to variables, and returns the results of `assign`."""
    values = [tf.convert_to_tensor(variable) for variable in variables]
    received = broadcast_group(values, root_rank, name, process_set=process_set)
    pairs = zip(variables, received, strict=True)
    return [variable.assign(value) for variable, value in pairs]


@do_not_convert
def alltoall(
    tensor: TensorLike,
    splits: Splits = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Sends a part of the rows to each rank, and returns the rows for this rank.

    The derivative sends the gradient of each row back to the rank that sent the row.

    Args:
        tensor: a tensor with at least one dimension; its dtype, and its dimensions
            except for the first, are the same on all ranks.
        splits: the number of rows for each rank, a list or tensor of integers; None
            sends equally many rows to all ranks.
        name, ignore_name_scope, process_set: as for `allreduce`.

    Returns:
        The received rows, in the order of the ranks. With `splits` also an int32 tensor
        with the number of rows that came from each rank.

    Raises: as `allreduce`; tf.errors.InvalidArgumentError also if `splits` do not fit.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> rows, received = hvd.alltoall(tf.range(3), splits=[3])
        >>> rows.numpy().tolist(), received.numpy().tolist()
        ([0, 1, 2], [3])
    """

    def rule(gradients: Tensors, received: RowCounts) -> Tensors:
        (gradient,), (back,) = gradients, received
        return [alltoall(gradient, back, None, ignore_name_scope, process_set)[0]]

    call = make_spec("alltoall", name, process_set, ignore_name_scope)
    (out,), (rows,) = run(call, [tensor], rule, splits)
    return out if splits is None else (out, tf.convert_to_tensor(rows, tf.int32))


@do_not_convert
def join() -> tf.Tensor:
    """Declares that this rank has no more data, and waits until all ranks have joined.

    Meanwhile this rank takes part in the operations of the other ranks, with zeros or
    without rows.

    Returns:
        The rank that was the last to join, an int32 tensor.

    Raises:
        HorovodInternalError: a rank is lost.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> int(hvd.join()) in range(hvd.size())
        True
    """
    if tf_private.executing_eagerly():
        return tf.constant(lane.join(), tf.int32)
    value = tf.numpy_function(lambda: np.int32(lane.join()), [], tf.int32)
    value.set_shape([])
    return value


@do_not_convert
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the process set have called `barrier`."""
    call = make_spec("barrier", None, process_set)
    run(call, [], lambda gradients, _: [])


@do_not_convert
def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns the rank as an int32 tensor. A graph reads the rank whenever it runs."""
    return read_rank_info("rank", name=name)


@do_not_convert
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns the local rank as int32. A graph reads the rank whenever it runs."""
    return read_rank_info("local_rank", name=name)


@do_not_convert
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns the size of a process set as int32. A graph reads it in every run.

    Raises:
        tf.errors.InvalidArgumentError: there is no such process set.
    """
    return read_rank_info("size", process_set_id, name)


@do_not_convert
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks on this host. A graph reads it in every run."""
    return read_rank_info("local_size", name=name)


@do_not_convert
def process_set_included_op(
    process_set_id: int = 0, name: str | None = None
) -> tf.Tensor:
    """Returns 1 if this rank is in a process set, and 0 if it is not.

    A graph reads the number when it runs. The number is -1 before `init`, and -2 if
    there is no such process set.
    """
    return read_rank_info("process_set_included", process_set_id, name)
