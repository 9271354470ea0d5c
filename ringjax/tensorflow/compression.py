"""Horovod's gradient compressions, and bf16: casts before and after an allreduce.

A compression only casts. The core computes the sums, and adds 16-bit floats up in
float32.
"""

from __future__ import annotations

import tensorflow as tf

from ringjax.tensorflow.tf_types import TensorLike


class Compressor:
    """The interface of a compression; this class changes nothing."""

    @staticmethod
    def compress(tensor: TensorLike) -> tuple[TensorLike, tf.DType | None]:
        """Returns the tensor to send, and the context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType | None) -> tf.Tensor:
        """Undoes `compress`."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class NoneCompressor(Compressor):
    """Sends tensors in their own dtype."""


class FP16Compressor(Compressor):
    """Sends floats as float16: 11 significant bits, up to 65504."""

    @staticmethod
    def compress(tensor: TensorLike) -> tuple[TensorLike, tf.DType | None]:
        """Casts a tensor of floats, and returns any other tensor as it is."""
        return _cast(tensor, tf.float16)


class BF16Compressor(Compressor):
    """Sends floats as bfloat16: 8 significant bits, the range of float32."""

    @staticmethod
    def compress(tensor: TensorLike) -> tuple[TensorLike, tf.DType | None]:
        """Casts a tensor of floats, and returns any other tensor as it is."""
        return _cast(tensor, tf.bfloat16)


class Compression:
    """The values of the argument `compression`.

    bf16 halves the bytes of float32 like fp16, and needs no loss scaling.

    Example:
        >>> packed, ctx = Compression.fp16.compress(tf.ones(2))
        >>> packed.dtype.name, Compression.fp16.decompress(packed, ctx).dtype.name
        ('float16', 'float32')
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _cast(tensor: TensorLike, dtype: tf.DType) -> tuple[TensorLike, tf.DType | None]:
    if tf.as_dtype(tensor.dtype).is_floating:
        return tf.cast(tensor, dtype), tensor.dtype
    return tensor, None
