"""Batch normalization with the statistics of all ranks' batches, a layer of Keras.

The means and squared deviations of the ranks are combined by the formula of Chan, Golub
and LeVeque, which subtracts no large numbers from each other.

References:
    S. Ioffe, C. Szegedy, Batch Normalization, ICML 2015.
    T. Chan, G. Golub, R. LeVeque, Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances, 1979.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ringjax import runtime
from ringjax.ops import Sum
from ringjax.tensorflow.movement import rank_op, size_op
from ringjax.tensorflow.mpi_ops import _allreduce

_NAME = "sync_batch_normalization"


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` over the batches of all ranks together.

    The layer needs Keras on TensorFlow. All ranks must call their layers in the same
    order; their batches may differ in size. With one rank the layer is an ordinary
    batch normalization.

    Args:
        fused: an argument of Horovod; must be False.
        **kwargs: as for `keras.layers.BatchNormalization`.

    Raises:
        ValueError: `fused` is true or None, or Keras runs on another backend.

    Example:
        >>> import ringjax.tensorflow as hvd, tensorflow as tf
        >>> hvd.init()
        >>> hvd.SyncBatchNormalization(axis=1)(tf.ones((4, 3)), training=True).shape
        TensorShape([4, 3])
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if keras.backend.backend() != "tensorflow":
            raise ValueError(
                "hvd.SyncBatchNormalization is for Keras on TensorFlow, not on "
                f"{keras.backend.backend()}"
            )
        kwargs["name"] = kwargs.get("name") or _NAME
        super().__init__(**kwargs)
        self.supports_jit = False  # the layer runs collectives

    def _moments(
        self, inputs: tf.Tensor, mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        mean, variance = super()._moments(inputs, mask)
        if runtime.size() == 1 and not runtime.elastic():
            return mean, variance
        count = tf.cast(self._values_per_channel(inputs, mask), mean.dtype)
        # The mean of a rank without values may be NaN.
        parts = [tf.where(count > 0, p, tf.zeros_like(p)) for p in (mean, variance)]
        own = tf.concat([tf.reshape(p, [-1]) for p in (count, *parts)], 0)
        # Gather the rows as a sum of matrices in which each rank fills only its own
        # row. The gradient of an allgather would average over the ranks, but here it
        # must be a sum.
        row = tf.one_hot(rank_op(), size_op(), dtype=own.dtype)
        rows = _allreduce(row[:, None] * own[None], op=Sum)
        channels = tf.size(mean)
        counts, means, variances = tf.split(rows, [1, channels, channels], axis=1)
        total = tf.reduce_sum(counts)
        global_mean = tf.reduce_sum(counts * means, 0) / total
        deviations = variances + tf.square(means - global_mean)
        global_variance = tf.reduce_sum(counts * deviations, 0) / total
        return (
            tf.reshape(global_mean, tf.shape(mean)),
            tf.reshape(global_variance, tf.shape(mean)),
        )

    def _values_per_channel(
        self, inputs: tf.Tensor, mask: tf.Tensor | None
    ) -> tf.Tensor:
        if mask is None:
            axes = self._reduction_axes
            return tf.reduce_prod(tf.gather(tf.shape(inputs), axes))
        # The mask lacks the last dimension, because each value is for all channels.
        wide = tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(inputs))
        weights = tf.reduce_sum(tf.cast(wide, inputs.dtype), self._reduction_axes)
        return tf.reshape(weights, [-1])[0]
