"""Horovod's reductions of PyTorch tensors: allreduce and reducescatter in all variants.

Differences to Horovod 0.28: tensors need not be contiguous, the dtypes bool, bfloat16
and complex work, and handles are objects. operations.py runs the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringjax.eager import lane
from ringjax.eager.handle import Handle
from ringjax.ops import Average, Sum
from ringjax.torch.compression import Compression, Compressor
from ringjax.torch.operations import (
    allreduce_tensors,
    first,
    reducescatter_tensors,
    reduction_options,
    run,
    submit,
    submit_ragged,
)
from ringjax.world.process_set import ProcessSet, global_process_set


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submits `allreduce` and returns a handle immediately; not differentiable."""
    options = reduction_options(average, op, prescale_factor, postscale_factor)
    return submit("allreduce", [tensor], name, process_set, options, pick=first)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submits `allreduce_` and returns a handle immediately; not differentiable.

    Do not use the tensor before `synchronize` has returned.
    """
    options = reduction_options(average, op, prescale_factor, postscale_factor)
    return submit(
        "allreduce", [tensor], name, process_set, options, pick=first, in_place=True
    )


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces into `tensor` itself and returns `tensor`; not differentiable."""
    options = reduction_options(average, op, prescale_factor, postscale_factor)
    return run("allreduce", [tensor], name, process_set, options, in_place=True)[0]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns the reduction of all ranks' tensors; the argument is not modified.

    Args:
        tensor: a tensor of the same dtype and shape on all ranks.
        average: a deprecated argument. True means op=Average, False means op=Sum.
        name: the name of the operation, the same on all ranks. Ranks may submit named
            operations in any order. An operation without a name receives a number, in
            the order of the calls.
        compression: the form in which the tensor is sent, see `Compression`.
        op: Average (if None), Sum, Min, Max, Product or Adasum. Sums of integers, also
            the sum that Average divides, wrap around in the dtype of the tensor.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; this rank must be among them.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.
        HorovodInternalError: the ranks disagree, or a rank is lost; the text names the
            rank.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.allreduce(torch.arange(3.0), name="loss").tolist()
        [0.0, 1.0, 2.0]

    Derivatives: the allreduce of the gradients, with the same op and factors.
    """
    options = reduction_options(average, op, prescale_factor, postscale_factor)
    return allreduce_tensors([tensor], name, compression, options, process_set)[0]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submits one `allreduce` of several tensors; its handle returns a tuple."""
    options = reduction_options(average, op, prescale_factor, postscale_factor)
    return submit("allreduce", tensors, name, process_set, options, pick=tuple)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submits one `allreduce_` of several tensors; its handle returns a tuple."""
    options = reduction_options(average, op, prescale_factor, postscale_factor)
    return submit(
        "allreduce", tensors, name, process_set, options, pick=tuple, in_place=True
    )


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Runs `allreduce_` of several tensors as one operation; returns the tensors."""
    options = reduction_options(average, op, prescale_factor, postscale_factor)
    return tuple(run("allreduce", tensors, name, process_set, options, in_place=True))


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Runs `allreduce` of several tensors as one operation; returns a list.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.grouped_allreduce([torch.ones(2), torch.tensor(3)], op=hvd.Max)
        [tensor([1., 1.]), tensor(3)]
    """
    options = reduction_options(average, op, prescale_factor, postscale_factor)
    return allreduce_tensors(tensors, name, compression, options, process_set)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Sums or averages sparse COO tensors by concatenating the entries of all ranks.

    Args:
        tensor: a tensor of layout `torch.sparse_coo`, of the same shape on all ranks.
        name: the name of the operation, the same on all ranks.
        op: Average or Sum.
        process_set: the ranks that take part; this rank must be among them.

    Returns:
        A function that waits and returns the tensor, which is not coalesced.

    Raises:
        TypeError, ValueError: another layout or op; nothing was sent.
        HorovodInternalError: the returned function raises it if the ranks disagree, or
            if a rank is lost.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> row = torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True)
        >>> hvd.sparse_allreduce_async(row, "row", hvd.Average)().to_dense().tolist()
        [0.0, 2.0, 0.0]
    """
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        raise TypeError(f"{lane.title('sparse_allreduce', name)}: no sparse COO tensor")
    if op not in (Average, Sum):
        raise ValueError(f"{lane.title('sparse_allreduce', name)}: op is {op!r}")
    parts = [tensor._indices().t(), tensor._values()]
    both = submit_ragged("allgather", parts, f"{name}.sparse", process_set, pick=list)

    def finish() -> Tensor:
        (indices, _), (values, _) = both.wait()
        values = values / process_set.size() if op == Average else values
        # PyTorch must check the indices of other ranks: with wrong indices, to_dense
        # would write outside of the memory of the tensor.
        entries = indices.t(), values
        return torch.sparse_coo_tensor(*entries, tensor.shape, check_invariants=True)

    return finish


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Submits `reducescatter` and returns a handle immediately; not differentiable."""
    options = reduction_options(None, op, prescale_factor, postscale_factor)
    return submit("reducescatter", [tensor], name, process_set, options, pick=first)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces like `allreduce`, and returns this rank's share of the rows.

    If the rows cannot be divided evenly, the first ranks receive one row more.

    Args, Raises: as `allreduce`; the tensor is not 0-d.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.reducescatter(torch.ones(4, 2)).shape[0] * hvd.size()
        4

    Derivatives: the allgather of the gradients, multiplied by the two factors, and for
    Sum also by the number of ranks.
    """
    options = reduction_options(None, op, prescale_factor, postscale_factor)
    return reducescatter_tensors([tensor], name, compression, options, process_set)[0]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Submits one `reducescatter` of several tensors; its handle returns a tuple."""
    options = reduction_options(None, op, prescale_factor, postscale_factor)
    return submit("reducescatter", tensors, name, process_set, options, pick=tuple)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Runs `reducescatter` of several tensors as one operation; returns a list."""
    options = reduction_options(None, op, prescale_factor, postscale_factor)
    return reducescatter_tensors(tensors, name, compression, options, process_set)
