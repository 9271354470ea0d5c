"""Batch normalization with the statistics of all ranks' batches, a layer of Keras.

S. Ioffe, C. Szegedy, Batch Normalization, ICML 2015. Means and squared deviations of
the ranks are combined as in T. Chan, G. Golub, R. LeVeque, Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances, 1979: nothing cancels.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ringjax import runtime
from ringjax.ops import Sum
from ringjax.tensorflow.movement import rank_op, size_op
from ringjax.tensorflow.private_reductions import _allreduce

_NAME = "sync_batch_normalization"


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` over the batches of all ranks together.

    For Keras on TensorFlow. All ranks must call it, in the same order; their batches
    may differ in size. With one rank it is the ordinary batch normalization.

    Args:
        fused: Horovod's; must be False.
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
        self.supports_jit = False  # ranks meet while it runs

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if runtime.size() == 1 and not runtime.elastic():
            return mean, variance
        count = tf.cast(self._count(inputs, mask), mean.dtype)
        # A rank without values has no mean.
        parts = [tf.where(count > 0, p, tf.zeros_like(p)) for p in (mean, variance)]
        mine = tf.concat([tf.reshape(p, [-1]) for p in (count, *parts)], 0)
        # A row for each rank. Not an allgather: its gradient would be an average.
        place = tf.one_hot(rank_op(), size_op(), dtype=mine.dtype)
        every = _allreduce(place[:, None] * mine[None], op=Sum)
        channels = tf.size(mean)
        counts, means, variances = tf.split(every, [1, channels, channels], axis=1)
        total = tf.reduce_sum(counts)
        mean_of_all = tf.reduce_sum(counts * means, 0) / total
        deviations = variances + tf.square(means - mean_of_all)
        variance_of_all = tf.reduce_sum(counts * deviations, 0) / total
        return (
            tf.reshape(mean_of_all, tf.shape(mean)),
            tf.reshape(variance_of_all, tf.shape(mean)),
        )

    def _count(self, inputs: Any, mask: Any) -> Any:
        """How many values a channel has here."""
        if mask is None:
            axes = self._reduction_axes
            return tf.reduce_prod(tf.gather(tf.shape(inputs), axes))
        # The mask lacks the last dimension, and is repeated along it.
        held = tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(inputs))
        weights = tf.reduce_sum(tf.cast(held, inputs.dtype), self._reduction_axes)
        return tf.reshape(weights, [-1])[0]
