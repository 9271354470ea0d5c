"""Horovod's operations that move TensorFlow's tensors, and those that only wait.

allgather, broadcast, alltoall; join and barrier; rank and size as tensors. How they run
is in operations.py.
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
    as_argument_error,
    make_spec,
    read_rank_info,
    reduction_options,
    run,
    run_allgather,
    run_allreduce,
)
from ringjax.tensorflow.variables import as_variable_list
from ringjax.world.process_set import ProcessSet, global_process_set


@do_not_convert
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the rows of all ranks' tensors, in the order of the ranks.

    Args, Raises: as `allreduce`. The tensor is not 0-d, and the number of its rows may
    differ from rank to rank.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allgather(tf.constant([7])).numpy().tolist()
        [7]

    Derivatives: this rank's rows of the average of all ranks' gradients, as Horovod has
    it.
    """
    return run_allgather([tensor], name, process_set, ignore_name_scope)[0]


@do_not_convert
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allgather` of several tensors as one operation; returns a list."""
    if not tensors:
        return []
    return run_allgather(tensors, name, process_set, ignore_name_scope)


@do_not_convert
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the tensor of `root_rank`, a rank of the world, on every rank.

    Args, Raises: as `allreduce`; the root is one of the process set.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast(tf.range(3), root_rank=0).numpy().tolist()
        [0, 1, 2]

    Derivatives: on the root the average of all ranks' gradients, as Horovod has it,
    elsewhere zero.
    """
    return broadcast_group([tensor], root_rank, name, ignore_name_scope, process_set)[0]


@do_not_convert
def broadcast_group(
    tensors: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`broadcast` of several tensors as one operation; not one of Horovod's."""

    def rule(gradients: Sequence[Any], _: Sequence[Any]) -> list[Any]:
        how = reduction_options("allreduce", None, None, 1.0, 1.0)
        means = run_allreduce(gradients, None, process_set, ignore_name_scope, how)
        here = tf.equal(read_rank_info("rank"), root_rank)
        return [tf.where(here, mean, tf.zeros_like(mean)) for mean in means]

    try:
        lane.root_in_set("broadcast", root_rank, process_set)
        call = make_spec("broadcast", name, process_set, root=int(root_rank))
    except (ValueError, TypeError) as error:
        raise as_argument_error(error) from None
    return run(call, tensors, rule, ignore_name_scope=ignore_name_scope)[0]


@do_not_convert
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gives all variables the values they have on `root_rank`, as one operation.

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
    values = broadcast_group(
        [tf.convert_to_tensor(v) for v in variables],
        root_rank,
        name,
        process_set=process_set,
    )
    written = [
        variable.assign(value)
        for variable, value in zip(variables, values, strict=True)
    ]
    # In a graph of TensorFlow 1 a value that is read says when: after this.
    with tf.control_dependencies([] if tf_private.executing_eagerly() else written):
        return [variable.read_value() for variable in variables]


@do_not_convert
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends a part of the rows to each rank, and returns the rows for this one.

    Args:
        tensor: not 0-d; the same dtype and the same dimensions but the first on all
            ranks.
        splits: how many rows go to each rank, a list or tensor of integers; None: all
            the same.
        name, ignore_name_scope, process_set: as for `allreduce`.

    Returns:
        The rows that came, in the order of the ranks; with `splits` also, as an int32
        tensor, how many came from each. Derivatives go the way back.

    Raises: as `allreduce`; InvalidArgumentError also for splits that do not fit.

    Example:
        >>> import ringjax.tensorflow as hvd
        >>> hvd.init()
        >>> rows, received = hvd.alltoall(tf.range(3), splits=[3])
        >>> rows.numpy().tolist(), received.numpy().tolist()
        ([0, 1, 2], [3])
    """

    def rule(gradients: Sequence[Any], received: Sequence[Any]) -> list[Any]:
        (gradient,), (back,) = gradients, received
        rest = (None, ignore_name_scope, process_set)
        return [alltoall(gradient, back, *rest)[0]]

    call = make_spec("alltoall", name, process_set)
    (out,), (rows,) = run(call, [tensor], rule, splits, ignore_name_scope)
    return out if splits is None else (out, tf.convert_to_tensor(rows, tf.int32))


@do_not_convert
def join() -> Any:
    """Says that this rank has no more data, and waits until all ranks say so.

    Until then it takes part in what the others submit, with zeros or no rows.

    Returns:
        The rank that was the last to join, an int32 tensor.

    Raises:
        HorovodInternalError: a rank is gone.

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
    """Waits until all ranks of the set have come here, when the program is run."""
    call = make_spec("barrier", None, process_set)
    run(call, [], lambda gradients, _: [])


@do_not_convert
def rank_op(name: str | None = None) -> Any:
    """The rank, an int32 tensor; in a graph, when that runs."""
    return read_rank_info("rank", name=name)


@do_not_convert
def local_rank_op(name: str | None = None) -> Any:
    """The rank on this host, an int32 tensor; in a graph, when that runs."""
    return read_rank_info("local_rank", name=name)


@do_not_convert
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """How many ranks a process set has, an int32 tensor; in a graph, when that runs.

    Raises:
        tf.errors.InvalidArgumentError: there is no such process set.
    """
    return read_rank_info("size", process_set_id, name)


@do_not_convert
def local_size_op(name: str | None = None) -> Any:
    """How many ranks this host has, an int32 tensor; in a graph, when that runs."""
    return read_rank_info("local_size", name=name)


@do_not_convert
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Whether this rank is in a process set, 0 or 1; in a graph, when that runs.

    -1 before `init`, -2 if there is no such set.
    """
    return read_rank_info("process_set_included", process_set_id, name)
