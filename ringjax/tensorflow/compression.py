"""Compression of gradients around an allreduce, with Horovod's names; bf16 is ours.

Only casts; sums are the core's, which adds 16-bit floats up in float32.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """What `compression=` accepts: a way there and a way back."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns what travels, and what `decompress` has to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undoes `compress`."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class NoneCompressor(Compressor):
    """Sends tensors as they are."""


class FP16Compressor(Compressor):
    """Sends floats as float16: 11 significant bits, up to 65504."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Casts floats, leaves everything else."""
        return _cast(tensor, tf.float16)


class BF16Compressor(Compressor):
    """Sends floats as bfloat16: 8 significant bits, the range of float32."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Casts floats, leaves everything else."""
        return _cast(tensor, tf.bfloat16)


class Compression:
    """The compressions that there are.

    Example:
        >>> packed, ctx = Compression.fp16.compress(tf.ones(2))
        >>> packed.dtype.name, Compression.fp16.decompress(packed, ctx).dtype.name
        ('float16', 'float32')
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _cast(tensor: Any, dtype: Any) -> tuple[Any, Any]:
    if tf.as_dtype(tensor.dtype).is_floating:
        return tf.cast(tensor, dtype), tensor.dtype
    return tensor, None
