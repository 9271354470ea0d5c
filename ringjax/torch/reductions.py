"""Horovod's reductions of PyTorch tensors: allreduce and reducescatter in all variants.

Differences to Horovod 0.28: tensors need not be contiguous; bool, bfloat16 and complex
numbers work; handles are objects. How they run is in operations.py.
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
    differentiable_allreduce,
    differentiable_reducescatter,
    first_result,
    reduction_arguments,
    run_elementwise,
    submit_elementwise,
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
    """`allreduce` that returns a handle at once; not differentiable."""
    call = reduction_arguments(average, op, prescale_factor, postscale_factor)
    return submit_elementwise(
        "allreduce", [tensor], name, process_set, first_result, call
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce_` that returns a handle at once; leave the tensor alone until then."""
    call = reduction_arguments(average, op, prescale_factor, postscale_factor)
    return submit_elementwise(
        "allreduce", [tensor], name, process_set, first_result, call, True
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
    """`allreduce` into `tensor` itself, which is returned; not differentiable."""
    call = reduction_arguments(average, op, prescale_factor, postscale_factor)
    return run_elementwise("allreduce", [tensor], name, process_set, call, True)[0]


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
        tensor: of the same dtype and shape on all ranks.
        average: deprecated; True is op=Average, False is op=Sum.
        name: what the operation is called on all ranks; ranks may submit their names in
            any order. None gives it a number, in the order of the calls.
        compression: what it travels as, see `Compression`.
        op: Average (if None), Sum, Min, Max, Product or Adasum. Sums of integers wrap
            around in their own dtype, also those that Average then divides.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; this rank must be one of them.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.
        HorovodInternalError: the ranks disagree, or one is gone; the text says who.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.allreduce(torch.arange(3.0), name="loss").tolist()
        [0.0, 1.0, 2.0]

    Derivatives: the allreduce of the gradients, with the same op and factors.
    """
    call = reduction_arguments(average, op, prescale_factor, postscale_factor)
    return differentiable_allreduce([tensor], name, compression, call, process_set)[0]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce_async` of several tensors as one operation; gives a tuple."""
    call = reduction_arguments(average, op, prescale_factor, postscale_factor)
    return submit_elementwise("allreduce", tensors, name, process_set, tuple, call)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce_async_` of several tensors as one operation; gives a tuple."""
    call = reduction_arguments(average, op, prescale_factor, postscale_factor)
    return submit_elementwise(
        "allreduce", tensors, name, process_set, tuple, call, True
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
    """`allreduce_` of several tensors as one operation; returns them."""
    call = reduction_arguments(average, op, prescale_factor, postscale_factor)
    return tuple(run_elementwise("allreduce", tensors, name, process_set, call, True))


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
    """`allreduce` of several tensors as one operation; returns a list.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.grouped_allreduce([torch.ones(2), torch.tensor(3)], op=hvd.Max)
        [tensor([1., 1.]), tensor(3)]
    """
    call = reduction_arguments(average, op, prescale_factor, postscale_factor)
    return differentiable_allreduce(tensors, name, compression, call, process_set)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Sums (or averages) sparse COO tensors: all ranks' entries, side by side.

    Args:
        tensor: of layout `torch.sparse_coo`; the same shape on all ranks.
        name: what the operation is called on all ranks.
        op: Average or Sum.
        process_set: the ranks that take part; this rank must be one of them.

    Returns:
        A function that waits and returns the tensor, which is not coalesced.

    Raises:
        TypeError, ValueError: another layout or op; nothing was sent.
        HorovodInternalError: from that function: the ranks disagree, or one is gone.

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
    both = submit_ragged("allgather", parts, f"{name}.sparse", process_set, list)

    def finish() -> Tensor:
        (indices, _), (values, _) = both.wait()
        values = values / process_set.size() if op == Average else values
        # Checked: a place outside of the tensor would be written to.
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
    """`reducescatter` that returns a handle at once; not differentiable."""
    call = reduction_arguments(None, op, prescale_factor, postscale_factor)
    return submit_elementwise(
        "reducescatter", [tensor], name, process_set, first_result, call
    )


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """`allreduce` of which each rank gets only its share of the rows.

    If they cannot be divided evenly, the first ranks get one more.

    Args, Raises: as `allreduce`; the tensor is not 0-d.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.reducescatter(torch.ones(4, 2)).shape[0] * hvd.size()
        4

    Derivatives: the allgather of the gradients, times the factors, for Sum also times
    the ranks.
    """
    call = reduction_arguments(None, op, prescale_factor, postscale_factor)
    return differentiable_reducescatter([tensor], name, compression, call, process_set)[
        0
    ]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`reducescatter_async` of several tensors as one operation; gives a tuple."""
    call = reduction_arguments(None, op, prescale_factor, postscale_factor)
    return submit_elementwise("reducescatter", tensors, name, process_set, tuple, call)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors as one operation; returns a list."""
    call = reduction_arguments(None, op, prescale_factor, postscale_factor)
    return differentiable_reducescatter(tensors, name, compression, call, process_set)
