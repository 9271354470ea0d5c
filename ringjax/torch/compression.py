"""Compression of gradients for an allreduce: Horovod's classes, and `bf16`.

The compressors only cast tensors. The core adds 16-bit floats in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Compressor:
    """Base class of the compressors that the argument `compression` accepts."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Returns the tensor to send, and the context that `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """Returns the reduced tensor in its original dtype."""
        return tensor if ctx is None else tensor.to(ctx)


class NoneCompressor(Compressor):
    """Sends tensors as they are."""


class FP16Compressor(Compressor):
    """Sends floats as float16: 11 significant bits, magnitudes up to 65504."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Casts floats, and leaves tensors of other dtypes as they are."""
        return _cast(tensor, torch.float16)


class BF16Compressor(Compressor):
    """Sends floats as bfloat16: 8 significant bits, the range of float32."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Casts floats, and leaves tensors of other dtypes as they are."""
        return _cast(tensor, torch.bfloat16)


class Compression:
    """The compressors that ringjax provides.

    Example:
        >>> import torch
        >>> packed, ctx = Compression.fp16.compress(torch.ones(2))
        >>> packed.dtype, Compression.fp16.decompress(packed, ctx).dtype
        (torch.float16, torch.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _cast(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, torch.dtype]:
    if tensor.dtype.is_floating_point:
        return tensor.to(dtype), tensor.dtype
    return tensor, tensor.dtype
