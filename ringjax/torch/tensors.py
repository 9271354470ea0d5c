"""PyTorch tensors as memory for the eager lane, and results as tensors.

What an operation makes of them, and its derivative, is in operations.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ringjax import _native, errors
from ringjax.eager import dtypes, lane

# Not all versions of PyTorch have all of them.
_NUMBERS = {
    getattr(torch, name): number
    for name, number in dtypes.NUMBERS.items()
    if hasattr(torch, name)
}
_COMPLEX = dtypes.NUMBERS["complex64"]  # and what has a greater number
_strided = torch.strided


# What the lane wants to know of each tensor; the memory that is sent, which is the
# tensor itself or a contiguous copy; where that is, {} on this host.
Prepared = tuple[list[lane.TensorRef], list[Tensor], lane.LaneOptions]


def prepare(op: str, name: str | None, tensors: Sequence[Tensor]) -> Prepared:
    """The tensors of one operation, ready to be sent.

    Raises:
        TypeError, ValueError: this cannot be sent.
    """
    pieces: list[lane.TensorRef] = []
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
        lazy = tensor.is_conj() if number >= _COMPLEX else tensor.is_neg()
        if lazy or not tensor.is_contiguous():
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        held.append(tensor)
        pieces.append((tensor.data_ptr(), number, tensor.shape))
    if not on_cuda and held:
        return pieces, held, {}
    if on_cuda < len(held):
        raise errors.InvalidArgument(
            f"{lane.title(op, name, pieces)}: some tensors are on the CPU, others on a "
            "CUDA device"
        )
    if not held:
        raise ValueError(f"{lane.title(op, name)}: no tensors")
    stream = torch.cuda.current_stream(held[0].device).cuda_stream
    return pieces, held, {"cuda": True, "stream": stream}


def wait_on_stream(ticket: Any, held: Tensor) -> None:
    """Lets what PyTorch does from now on, on its current stream, find the results."""
    try:
        ticket.wait(torch.cuda.current_stream(held.device).cuda_stream)
    except _native.StatusError as error:
        raise errors.from_status(error) from None


def _unsupported(op: str, name: str | None, tensor: Tensor) -> str:
    shape = list(tensor.shape)
    return (
        f"{lane.title(op, name)}: Tensor type {tensor.dtype} is not supported (layout "
        f"{tensor.layout}, device {tensor.device}, shape {shape}); expected a dense "
        f"tensor on a CPU or CUDA device, of dtype {', '.join(dtypes.NUMBERS)}"
    )


def rows_from_memory(memory: Any, rows: int, like: Tensor) -> Tensor:
    """`rows` rows in memory of the core, which the tensor keeps alive.

    On a device they are copied: there, memory must be PyTorch's, or its streams would
    not be waited for before it is used again.
    """
    shape = (rows, *like.shape[1:])
    if not math.prod(shape):
        return like.new_empty(shape)
    if like.is_cuda:
        return from_dlpack(memory).view(like.dtype).clone()
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)
