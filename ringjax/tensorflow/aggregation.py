"""Gradients of several backward passes added up on this rank before they are reduced.

For every kind of optimizer, eagerly, inside of `tf.function` and in the graphs of
TensorFlow 1. How the sums are reduced is gradients.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.gradients import divide_gradient

_SPARSE = (
    "IndexedSlices are not supported when `backward_passes_per_step` > 1 and "
    "`sparse_as_dense` is False."
)
_COLLECTIONS = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]


class LocalAggregation:
    """Adds gradients up, and hands the sums on every so many calls.

    In a graph of TensorFlow 1 the sums are local variables, which a program
    initializes with `tf.compat.v1.local_variables_initializer`.

    Args:
        passes: `backward_passes_per_step`, at least 1.
        reduce: makes the sums those of all ranks; gets gradients and variables.
        sparse_as_dense: whether `tf.IndexedSlices` may come, to be added up as dense.
        average: divide the sums by `passes`.
        name: of the variables.

    Attributes:
        counter: a variable, the calls since sums were handed on last.

    Raises:
        ValueError: `passes` is below 1.
    """

    def __init__(
        self,
        passes: int,
        reduce: Callable[[list[Any], Sequence[Any]], list[Any]],
        sparse_as_dense: bool,
        average: bool,
        name: str,
    ) -> None:
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self._passes = passes
        self._reduce = reduce
        self._sparse_as_dense = sparse_as_dense
        self._average = average
        self._name = name
        self._sums: dict[int, Any] = {}
        with tf.init_scope():
            self.counter = self._variable(0, tf.int32, "aggregation_counter")

    @do_not_convert
    def compute_gradients(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """Adds these gradients.

        Returns:
            Every `passes` calls the sums, reduced, and the sums begin anew. After other
            calls the sums so far, which are not to be applied: `apply_gradients` knows.

        Raises:
            ValueError: `tf.IndexedSlices` come, and `sparse_as_dense` is False.
        """
        dense = [self._dense(gradient) for gradient in gradients]
        places = [i for i, gradient in enumerate(dense) if gradient is not None]
        self._create_variables(dense, places)
        sums = [self._sums[i] for i in places]
        added = [self._sums[i].assign_add(dense[i]) for i in places]
        with tf.control_dependencies(added):
            count = tf.identity(self.counter.assign_add(1))

        def hand_on() -> list[Any]:
            whole: list[Any] = [None] * len(dense)
            for i, total in zip(places, sums, strict=True):
                whole[i] = tf.identity(total.read_value())
            with tf.control_dependencies([whole[i] for i in places]):
                # Before they are reduced: after a failure they begin anew, too.
                cleared = [total.assign(tf.zeros_like(total)) for total in sums]
                cleared.append(self.counter.assign(0))
            with tf.control_dependencies(cleared):
                reduced = self._reduce(whole, variables)
                divisor = self._passes if self._average else 1
                return [
                    tf.identity(divide_gradient(reduced[i], divisor)) for i in places
                ]

        def hold() -> list[Any]:
            return [tf.identity(total.read_value()) for total in sums]

        if not places:
            return dense
        with tf.control_dependencies([count]):
            found = tf.cond(tf.equal(count, self._passes), hand_on, hold)
        found = [found] if tf.is_tensor(found) else list(found)
        for i, gradient in zip(places, found, strict=True):
            dense[i] = gradient
        return dense

    @do_not_convert
    def apply_gradients(
        self,
        apply: Callable[[], Any],
        otherwise: Callable[[], Any],
        gradients: Sequence[Any],
    ) -> Any:
        """Calls `apply` if the last gradients were handed on, else `otherwise`.

        Args:
            apply: applies the gradients.
            otherwise: counts a step in which nothing is applied.
            gradients: what `compute_gradients` has returned.

        Returns:
            What the function has, in eager mode; an operation in a graph.
        """
        if tf.executing_eagerly():
            return otherwise() if int(self.counter.numpy()) else apply()

        def then() -> Any:
            return _operation(apply())

        def other() -> Any:
            return _operation(otherwise())

        known = [gradient for gradient in gradients if gradient is not None]
        with tf.control_dependencies(known):
            return tf.cond(tf.equal(self.counter.read_value(), 0), then, other)

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self._sparse_as_dense:
            raise ValueError(_SPARSE)
        return tf.convert_to_tensor(gradient)

    def _create_variables(self, gradients: list[Any], places: list[int]) -> None:
        for i in places:
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
                self._sums[i] = self._variable(zeros, dtype, f"aggregation_{i}")

    def _variable(self, value: Any, dtype: Any, name: str) -> Any:
        name = f"{self._name}_{name}"
        if tf.executing_eagerly():
            return tf.Variable(value, trainable=False, dtype=dtype, name=name)
        return tf.compat.v1.Variable(
            *(value,),
            trainable=False,
            dtype=dtype,
            name=name,
            collections=_COLLECTIONS,
            use_resource=True,
        )


def _operation(done: Any) -> Any:
    return tf.no_op() if done is None else tf.group(done)
