"""Named reductions of arrays of any framework: allreduce and reducescatter."""

from __future__ import annotations

from collections.abc import Sequence

from ringjax.eager import lane
from ringjax.eager.handle import Handle
from ringjax.eager.operands import AnyArray
from ringjax.eager.operations import as_list, first, runs_plain, submit_reduction
from ringjax.ops import ReduceOp
from ringjax.world.process_set import ProcessSet, global_process_set


def allreduce_async(
    tensor: AnyArray,
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: AnyArray = None,
) -> Handle:
    """Submits an `allreduce` and returns its handle immediately.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> handle = ringjax.eager.allreduce_async(2.0, name="loss")
        >>> ringjax.eager.synchronize(handle)
        2.0
    """
    options = lane.reduction_options("allreduce", op, prescale_factor, postscale_factor)
    return submit_reduction(
        "allreduce", [tensor], name, process_set, as_list(out), options, pick=first
    )


@runs_plain
def allreduce(
    tensor: AnyArray,
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: AnyArray = None,
) -> AnyArray:
    """Reduces `tensor` over all ranks that submit an allreduce of this name.

    Args:
        tensor: an array of numpy, JAX or PyTorch, a number, or any object in the memory
            of this host with ``__dlpack__`` or a buffer. `tensor` is not modified. All
            ranks must pass the same dtype and shape; their frameworks may differ.
        op: Average, Sum, Min, Max, Product or Adasum. Average of integers truncates
            toward zero. For bool, Sum and Max mean "or", Min and Product mean "and".
            Sums of integers wrap around in their dtype, as in NumPy, even if Average
            divides the sums afterwards: convert `tensor` to a wider dtype if sums may
            not fit.
        name: the name of the operation, equal on all ranks. Each rank may submit its
            operations in any order. Operations without a name are matched in the order
            of the calls.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; this rank must be among them.
        out: receives the result: a contiguous numpy array, or a PyTorch tensor on the
            CPU, of the dtype and shape of the result. `out` may be `tensor` itself. For
            a large result, allocating new memory takes longer than the operation.

    Returns:
        The reduced tensor, as an array of the framework of `tensor`; `out` if given.

    Raises:
        NotInitialized: before ringjax.init().
        TypeError, ValueError: an argument is wrong; nothing was sent.
        Mismatch: the ranks have passed different dtypes, shapes or ops. All ranks raise
            this error, and the job continues.
        Stalled: a rank has not submitted the operation in time.
        PeerLost: a rank is lost.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> ringjax.eager.allreduce(np.arange(3.0), name="loss").tolist()
        [0.0, 1.0, 2.0]
    """
    options = lane.reduction_options("allreduce", op, prescale_factor, postscale_factor)
    return submit_reduction(
        "allreduce",
        [tensor],
        name,
        process_set,
        as_list(out),
        options | lane.WAITS,
        pick=first,
    ).wait()


def grouped_allreduce_async(
    tensors: Sequence[AnyArray],
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Sequence[AnyArray] | None = None,
) -> Handle:
    """Submits a `grouped_allreduce` and returns its handle immediately."""
    options = lane.reduction_options("allreduce", op, prescale_factor, postscale_factor)
    return submit_reduction("allreduce", tensors, name, process_set, out, options)


def grouped_allreduce(
    tensors: Sequence[AnyArray],
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Sequence[AnyArray] | None = None,
) -> list[AnyArray]:
    """Reduces several tensors as one operation; see `allreduce`.

    Args:
        tensors: a list or tuple of tensors, which may differ in dtype and shape.
        out: a list of arrays that receive the results, one for each tensor.

    Other arguments, Raises: as `allreduce`.

    Returns:
        The list of the reduced tensors.

    Example:
        >>> import ringjax
        >>> ringjax.init()
        >>> ringjax.eager.grouped_allreduce([1.0, 2], ringjax.Max)
        [1.0, 2]
    """
    options = lane.reduction_options("allreduce", op, prescale_factor, postscale_factor)
    result: list[AnyArray] = submit_reduction(
        "allreduce", tensors, name, process_set, out, options | lane.WAITS
    ).wait()
    return result


def reducescatter_async(
    tensor: AnyArray,
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: AnyArray = None,
) -> Handle:
    """Submits a `reducescatter` and returns its handle immediately."""
    options = lane.reduction_options(
        "reducescatter", op, prescale_factor, postscale_factor
    )
    return submit_reduction(
        "reducescatter", [tensor], name, process_set, as_list(out), options, pick=first
    )


@runs_plain
def reducescatter(
    tensor: AnyArray,
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: AnyArray = None,
) -> AnyArray:
    """Reduces `tensor` as `allreduce` does, but each rank receives only some rows.

    Args:
        tensor: as for `allreduce`, with at least one dimension.
        out: as for `allreduce`, but `out` must not share memory with `tensor`.

    Other arguments, Raises: as `allreduce`.

    Returns:
        This rank's rows of the result. The rows are divided in the order of the ranks.
        If the rows cannot be divided evenly, the first ranks receive one row more.

    Example:
        >>> import numpy as np, ringjax
        >>> ringjax.init()
        >>> ringjax.eager.reducescatter(np.ones((4, 2))).shape == (4, 2)
        True
    """
    options = lane.reduction_options(
        "reducescatter", op, prescale_factor, postscale_factor
    )
    return submit_reduction(
        "reducescatter",
        [tensor],
        name,
        process_set,
        as_list(out),
        options | lane.WAITS,
        pick=first,
    ).wait()


def grouped_reducescatter_async(
    tensors: Sequence[AnyArray],
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Sequence[AnyArray] | None = None,
) -> Handle:
    """Submits a `grouped_reducescatter` and returns its handle immediately."""
    options = lane.reduction_options(
        "reducescatter", op, prescale_factor, postscale_factor
    )
    return submit_reduction("reducescatter", tensors, name, process_set, out, options)


def grouped_reducescatter(
    tensors: Sequence[AnyArray],
    op: int = ReduceOp.Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    out: Sequence[AnyArray] | None = None,
) -> list[AnyArray]:
    """Runs `reducescatter` on several tensors as one operation.

    Arguments, Raises: as `grouped_allreduce`; see `reducescatter` for the tensors.

    Returns:
        The list of this rank's rows of each reduced tensor.
    """
    options = lane.reduction_options(
        "reducescatter", op, prescale_factor, postscale_factor
    )
    result: list[AnyArray] = submit_reduction(
        "reducescatter", tensors, name, process_set, out, options | lane.WAITS
    ).wait()
    return result
