"""Named reductions of arrays of any framework: allreduce and reducescatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringjax.eager.handle import Handle
from ringjax.eager.operations import as_list, first, reduce, reduce_blocking
from ringjax.ops import ReduceOp
from ringjax.world.process_set import ProcessSet, global_process_set

_global = global_process_set


def allreduce_async(
    tensor: Any,
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _global,
    out: Any = None,
) -> Handle:
    """`allreduce` that returns a handle at once.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> handle = ringjax.eager.allreduce_async(2.0, name="loss")
        >>> ringjax.eager.synchronize(handle)
        2.0
    """
    return reduce(
        *("allreduce", [tensor], name, op, prescale_factor, postscale_factor),
        *(process_set, first, as_list(out)),
    )


def allreduce(
    tensor: Any,
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _global,
    out: Any = None,
) -> Any:
    """Reduces `tensor` over all ranks that submit an allreduce of this name.

    Args:
        tensor: an array of numpy, JAX or PyTorch, a number, or anything else in the
            memory of this host with ``__dlpack__`` or a buffer. Not modified. The ranks
            need not use the same framework, but the same dtype and shape.
        op: Average, Sum, Min, Max, Product or Adasum. Average of integers truncates
            toward zero; for bool, Sum and Max are "or", Min and Product are "and".
            Sums of integers wrap around in their own dtype, as in NumPy, also those
            that Average then divides: widen what may not fit.
        name: what the operation is called on all ranks. Ranks may submit their names
            in any order. None gives it a number, in the order of the calls.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; this rank must be one of them.
        out: where the result goes: a numpy array, or a PyTorch tensor on the CPU, of
            the dtype and shape of the result, contiguous; maybe `tensor` itself. New
            memory costs more time than the operation where it is large.

    Returns:
        The reduced tensor, in the framework of `tensor`; `out` if that is given.

    Raises:
        NotInitialized: before ringjax.init().
        TypeError, ValueError: a bad argument; nothing was sent.
        Mismatch: the ranks disagree; all of them get this, and go on.
        Stalled, PeerLost: a rank does not come, or is gone.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> ringjax.eager.allreduce(np.arange(3.0), name="loss").tolist()
        [0.0, 1.0, 2.0]
    """
    return reduce_blocking(
        *("allreduce", tensor, name, op, prescale_factor, postscale_factor),
        *(process_set, out),
    )


def grouped_allreduce_async(
    tensors: Sequence[Any],
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _global,
    out: Sequence[Any] | None = None,
) -> Handle:
    """`grouped_allreduce` that returns a handle at once."""
    return reduce(
        *("allreduce", tensors, name, op, prescale_factor, postscale_factor),
        *(process_set, list, out),
    )


def grouped_allreduce(
    tensors: Sequence[Any],
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _global,
    out: Sequence[Any] | None = None,
) -> list[Any]:
    """`allreduce` of several tensors as one operation; returns a list.

    They become ready together, and may differ in dtype and shape.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.eager.grouped_allreduce([1.0, 2], ringjax.Max)
        [1.0, 2]
    """
    result: list[Any] = reduce(
        *("allreduce", tensors, name, op, prescale_factor, postscale_factor),
        *(process_set, list, out),
        waits=True,
    ).wait()
    return result


def reducescatter_async(
    tensor: Any,
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _global,
    out: Any = None,
) -> Handle:
    """`reducescatter` that returns a handle at once."""
    return reduce(
        *("reducescatter", [tensor], name, op, prescale_factor, postscale_factor),
        *(process_set, first, as_list(out)),
    )


def reducescatter(
    tensor: Any,
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _global,
    out: Any = None,
) -> Any:
    """Reduces `tensor` as `allreduce`, but each rank gets only its share of the rows.

    Args, Raises: as `allreduce`; the tensor is not 0-d, and `out` not a part of it.

    Returns:
        Rows of the result in the order of the ranks; if they cannot be divided evenly,
        the first ranks have one more.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> ringjax.eager.reducescatter(np.ones((4, 2))).shape == (4, 2)
        True
    """
    return reduce_blocking(
        *("reducescatter", tensor, name, op, prescale_factor, postscale_factor),
        *(process_set, out),
    )


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _global,
    out: Sequence[Any] | None = None,
) -> Handle:
    """`grouped_reducescatter` that returns a handle at once."""
    return reduce(
        *("reducescatter", tensors, name, op, prescale_factor, postscale_factor),
        *(process_set, list, out),
    )


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _global,
    out: Sequence[Any] | None = None,
) -> list[Any]:
    """`reducescatter` of several tensors as one operation; returns a list."""
    result: list[Any] = reduce(
        *("reducescatter", tensors, name, op, prescale_factor, postscale_factor),
        *(process_set, list, out),
        waits=True,
    ).wait()
    return result
