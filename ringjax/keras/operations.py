"""Horovod's operations on values in Keras programs, outside of train steps.

A value is anything that Keras can convert to a tensor. Results are tensors of the
backend.
"""

from __future__ import annotations

from ringjax.eager import lane
from ringjax.keras.backends import backend
from ringjax.keras.keras_types import Compressor, Tensor
from ringjax.ops import Average, ReduceOp


def allreduce(
    value: Tensor,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Compressor = None,
) -> Tensor:
    """Returns the reduction of the values of all ranks.

    Args:
        value: a number, an array or a tensor, of the same shape and dtype on all ranks.
        name: the name of the operation, the same on all ranks. If it is None, the
            operation is numbered in the order of the calls.
        average: Horovod's former argument: True means op=Average, False means op=Sum.
        prescale_factor: multiplies each rank's value before the reduction.
        postscale_factor: multiplies the result.
        op: Average (if None), Sum, Min, Max, Product or Adasum.
        compression: the form in which floats are sent, see `Compression`; None means no
            compression.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was sent.
        HorovodInternalError: the ranks disagree, or a rank is lost; the text names the
            rank.

    Example:
        >>> import ringjax.keras as hvd
        >>> hvd.init()
        >>> float(hvd.allreduce(2.0, name="loss"))
        2.0
    """
    chosen = ReduceOp(lane.reduce_op("allreduce", lane.op_or_average(average, op)))
    if compression is None:
        compression = backend().compression.none
    return backend().allreduce(
        value, name, chosen, prescale_factor, postscale_factor, compression
    )


def allgather(value: Tensor, name: str | None = None) -> Tensor:
    """Returns the rows of all ranks, in the order of the ranks.

    The numbers of rows may differ between ranks.

    Args, Raises: as `allreduce`. The value has at least one dimension.

    Example:
        >>> import ringjax.keras as hvd
        >>> hvd.init()
        >>> len(hvd.allgather([1.0, 2.0])) // hvd.size()
        2
    """
    return backend().allgather(value, name)


def broadcast(value: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Returns the value of the root on every rank.

    Args, Raises: as `allreduce`.

    Example:
        >>> import ringjax.keras as hvd
        >>> hvd.init()
        >>> float(hvd.broadcast(3.0, root_rank=0))
        3.0
    """
    return backend().broadcast(value, root_rank, name)


def reducescatter(value: Tensor, name: str | None = None, op: int = Average) -> Tensor:
    """Reduces like `allreduce`, and returns this rank's share of the rows.

    Args, Raises: as `allreduce`. The value has at least one dimension.

    Example:
        >>> import ringjax.keras as hvd
        >>> hvd.init()
        >>> len(hvd.reducescatter([1.0, 2.0])) * hvd.size()
        2
    """
    chosen = ReduceOp(lane.reduce_op("reducescatter", op))
    return backend().reducescatter(value, name, chosen)


def broadcast_global_variables(root_rank: int) -> object:
    """Broadcasts all variables of a graph of TensorFlow 1.

    The function calls `ringjax.tensorflow.broadcast_global_variables`.

    Raises:
        RuntimeError: called outside of a graph of TensorFlow 1, where Keras has no list
            of all variables. The text names the alternatives.
    """
    return backend().broadcast_global_variables(root_rank)
