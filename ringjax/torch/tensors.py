"""Describes PyTorch tensors for the eager lane, and makes tensors from its results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ringjax import _native, errors
from ringjax.eager import dtypes, lane, result_memory

# The lane's dtype codes. Old versions of PyTorch lack some dtypes.
_NUMBERS = {
    getattr(torch, name): number
    for name, number in dtypes.NUMBERS.items()
    if hasattr(torch, name)
}
_COMPLEX = dtypes.NUMBERS["complex64"]  # the complex dtypes have the greatest codes
_strided = torch.strided


# The result of `prepare`: address, dtype and shape of each tensor; the tensors that own
# this memory, which may be contiguous copies; the CUDA stream, or {} for host memory.
Prepared = tuple[list[lane.TensorRef], list[Tensor], lane.LaneOptions]


def prepare(op: str, name: str | None, tensors: Sequence[Tensor]) -> Prepared:
    """Describes the tensors of one operation for the lane."""
    refs: list[lane.TensorRef] = []
    held: list[Tensor] = []
    on_cuda = 0
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{lane.title(op, name)}: expected a torch.Tensor, got a "
                f"{type(tensor).__name__}"
            )
        number = _NUMBERS.get(tensor.dtype)
        if number is None or tensor.layout is not _strided:
            raise ValueError(_unsupported(op, name, tensor))
        if not tensor.is_cpu:
            if not tensor.is_cuda:
                raise ValueError(_unsupported(op, name, tensor))
            on_cuda += 1
        # PyTorch conjugates and negates lazily, so the memory may have other values.
        lazy = tensor.is_conj() if number >= _COMPLEX else tensor.is_neg()
        if lazy or not tensor.is_contiguous():
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        held.append(tensor)
        refs.append((tensor.data_ptr(), number, tensor.shape))
    if not on_cuda and held:
        return refs, held, {}
    if on_cuda < len(held):
        raise errors.InvalidArgument(
            f"{lane.title(op, name, refs)}: some tensors are on the CPU, others on a "
            "CUDA device"
        )
    if not held:
        raise ValueError(f"{lane.title(op, name)}: no tensors")
    stream = torch.cuda.current_stream(held[0].device).cuda_stream
    return refs, held, {"cuda": True, "stream": stream}


def wait_on_stream(work: _native.Work, held: Tensor) -> None:
    """Makes PyTorch's current stream wait for the results of the operation."""
    try:
        work.wait(torch.cuda.current_stream(held.device).cuda_stream)
    except _native.StatusError as error:
        raise errors.from_status(error) from None


def _unsupported(op: str, name: str | None, tensor: Tensor) -> str:
    shape = list(tensor.shape)
    return (
        f"{lane.title(op, name)}: Tensor type {tensor.dtype} is not supported (layout "
        f"{tensor.layout}, device {tensor.device}, shape {shape}); expected a dense "
        f"tensor on a CPU or CUDA device, of dtype {', '.join(dtypes.NUMBERS)}"
    )


def new_result(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a contiguous tensor with arbitrary contents, for a result."""
    size = math.prod(shape) * like.element_size()
    if like.is_cuda or size < result_memory.LEAST:
        return like.new_empty(shape)
    block = result_memory.empty((size,), np.dtype(np.uint8))
    return torch.from_numpy(block).view(like.dtype).view(shape)


def rows_from_memory(memory: object, rows: int, like: Tensor) -> Tensor:
    """Returns a tensor of `rows` rows that keeps the core's `memory` alive.

    Rows on a device are copied. PyTorch's allocator reuses device memory only when no
    stream of PyTorch can read it any more; the core does not wait for these streams.
    """
    shape = (rows, *like.shape[1:])
    if not math.prod(shape):
        return like.new_empty(shape)
    if like.is_cuda:
        return from_dlpack(memory).view(like.dtype).clone()
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)
