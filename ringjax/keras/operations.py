"""Horovod's operations on values in Keras programs, outside of train steps.

A value is anything that Keras can make a tensor of; results are tensors of the backend.
"""

from __future__ import annotations

from typing import Any

from ringjax.eager import lane
from ringjax.keras.backends import backend
from ringjax.ops import Average, ReduceOp


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = None,
) -> Any:
    """The reduction of all ranks' values; of one shape and dtype on all ranks.

    Args:
        value: a number, an array or a tensor.
        name: what the operation is called on all ranks; None: its number.
        average: Horovod's older argument: True is op=Average, False is op=Sum.
        prescale_factor: multiplies each rank's value before the reduction.
        postscale_factor: multiplies the result.
        op: Average (if None), Sum, Min, Max, Product or Adasum.
        compression: what floats travel as, see `Compression`; None: as they are.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.
        HorovodInternalError: the ranks disagree, or one is gone; the text says who.

    Example:
        >>> import ringjax.keras as hvd
        >>> hvd.init()
        >>> float(hvd.allreduce(2.0, name="loss"))
        2.0
    """
    op = lane.op_or_average(average, op)
    chosen = ReduceOp(lane.reduce_op("allreduce", op))
    tensors = backend()
    chosen_compression = (
        tensors.compression.none if compression is None else compression
    )
    factors = prescale_factor, postscale_factor
    return tensors.allreduce(value, name, chosen, *factors, chosen_compression)


def allgather(value: Any, name: str | None = None) -> Any:
    """All ranks' rows, one after the other; their number may differ.

    Args, Raises: as `allreduce`; the value is not 0-d.

    Example:
        >>> import ringjax.keras as hvd
        >>> hvd.init()
        >>> len(hvd.allgather([1.0, 2.0])) // hvd.size()
        2
    """
    return backend().allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value, on every rank.

    Args, Raises: as `allreduce`.

    Example:
        >>> import ringjax.keras as hvd
        >>> hvd.init()
        >>> float(hvd.broadcast(3.0, root_rank=0))
        3.0
    """
    return backend().broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """This rank's share of the rows of an allreduce.

    Args, Raises: as `allreduce`; the value is not 0-d.

    Example:
        >>> import ringjax.keras as hvd
        >>> hvd.init()
        >>> len(hvd.reducescatter([1.0, 2.0])) * hvd.size()
        2
    """
    chosen = ReduceOp(lane.reduce_op("reducescatter", op))
    return backend().reducescatter(value, name, chosen)


def broadcast_global_variables(root_rank: int) -> Any:
    """Horovod's function for TensorFlow 1, which knew all variables of a program.

    As in Horovod's eager mode there is no such list, so this only says what to do. In a
    graph of TensorFlow 1 it is `ringjax.tensorflow.broadcast_global_variables`.

    Raises:
        RuntimeError: outside of such a graph.
    """
    return backend().broadcast_global_variables(root_rank)
