"""Adds up the gradients of several backward passes before they are reduced.

The optimizers of TensorFlow 1 use this module, in eager mode and in graphs.
gradients.py reduces the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.gradients import divide_gradient
from ringjax.tensorflow.tf_types import Gradient, TensorLike, Variable

_SPARSE = (
    "IndexedSlices are not supported when `backward_passes_per_step` > 1 and "
    "`sparse_as_dense` is False."
)


class LocalAggregation:
    """Adds up the gradients of several calls, and reduces the sums in every n-th call.

    In a graph of TensorFlow 1 the sums are local variables, which a program initializes
    with `tf.compat.v1.local_variables_initializer`.

    Args:
        passes: `backward_passes_per_step`, the number n; at least 1.
        reduce: reduces the sums over all ranks. Its arguments are the sums and the
            variables.
        sparse_as_dense: whether `tf.IndexedSlices` become dense tensors; otherwise they
            cause a ValueError.
        average: whether the sums are divided by `passes`.
        name: the prefix of the names of the sums and of the counter.

    Attributes:
        counter: a variable, the number of calls since the last reduction.
    """

    def __init__(
        self,
        passes: int,
        reduce: Callable[[list[Gradient], Sequence[Variable]], list[Gradient]],
        sparse_as_dense: bool,
        average: bool,
        name: str,
    ) -> None:
        self._passes = passes
        self._reduce = reduce
        self._sparse_as_dense = sparse_as_dense
        self._average = average
        self._name = name
        self._sums: dict[int, tf.Variable] = {}
        with tf.init_scope():
            self.counter = self._create_variable(0, tf.int32, "aggregation_counter")

    @do_not_convert
    def compute_gradients(
        self, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> list[Gradient]:
        """Adds gradients to the sums.

        Every n-th call returns the reduced sums and begins new sums. Other calls return
        the current sums, which `apply_gradients` does not apply.
        """
        dense = [self._to_dense(gradient) for gradient in gradients]
        present = [i for i, gradient in enumerate(dense) if gradient is not None]
        self._create_sums(dense, present)
        sums = [self._sums[i] for i in present]
        added = [self._sums[i].assign_add(dense[i]) for i in present]
        with tf.control_dependencies(added):
            count = tf.identity(self.counter.assign_add(1))

        def reduce() -> list[tf.Tensor]:
            totals: list[Gradient] = [None] * len(dense)
            for i, total in zip(present, sums, strict=True):
                totals[i] = tf.identity(total.read_value())
            with tf.control_dependencies([totals[i] for i in present]):
                # Clear the sums before the reduction. If the reduction fails, the
                # program may repeat the step, which must not add to old sums.
                cleared = [total.assign(tf.zeros_like(total)) for total in sums]
                cleared.append(self.counter.assign(0))
            with tf.control_dependencies(cleared):
                reduced = self._reduce(totals, variables)
                divisor = self._passes if self._average else 1
                return [
                    tf.identity(divide_gradient(reduced[i], divisor)) for i in present
                ]

        def keep() -> list[tf.Tensor]:
            return [tf.identity(total.read_value()) for total in sums]

        if not present:
            return dense
        with tf.control_dependencies([count]):
            found = tf.cond(tf.equal(count, self._passes), reduce, keep)
        found = [found] if tf.is_tensor(found) else list(found)
        for i, gradient in zip(present, found, strict=True):
            dense[i] = gradient
        return dense

    @do_not_convert
    def apply_gradients(
        self,
        apply: Callable[[], Any],
        otherwise: Callable[[], Any],
        gradients: Sequence[Gradient],
    ) -> Any:
        """Calls `apply` if `compute_gradients` reduced the sums, otherwise `otherwise`.

        `gradients` is the result of `compute_gradients`. In a graph the result of this
        method is an operation.
        """
        if tf.executing_eagerly():
            return otherwise() if int(self.counter.numpy()) else apply()
        present = [gradient for gradient in gradients if gradient is not None]
        with tf.control_dependencies(present):
            return tf.cond(
                tf.equal(self.counter.read_value(), 0),
                lambda: _as_operation(apply()),
                lambda: _as_operation(otherwise()),
            )

    def _to_dense(self, gradient: Gradient) -> tf.Tensor | None:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self._sparse_as_dense:
            raise ValueError(_SPARSE)
        return tf.convert_to_tensor(gradient)

    def _create_sums(self, gradients: list[Gradient], present: list[int]) -> None:
        for i in present:
            if i in self._sums:
                continue
            gradient = gradients[i]
            if not gradient.shape.is_fully_defined():
                raise ValueError(
                    f"gradient {i} has the shape {gradient.shape}, which must be known "
                    "when backward_passes_per_step > 1"
                )
            shape, dtype = tuple(gradient.shape.as_list()), gradient.dtype
            with tf.init_scope():
                zeros = tf.zeros(shape, dtype)
                self._sums[i] = self._create_variable(zeros, dtype, f"aggregation_{i}")

    def _create_variable(
        self, value: TensorLike, dtype: tf.DType, name: str
    ) -> tf.Variable:
        name = f"{self._name}_{name}"
        if tf.executing_eagerly():
            return tf.Variable(value, trainable=False, dtype=dtype, name=name)
        return tf.compat.v1.Variable(
            value,
            trainable=False,
            dtype=dtype,
            name=name,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            use_resource=True,
        )


def _as_operation(result: Any) -> tf.Operation:
    return tf.no_op() if result is None else tf.group(result)
