"""Distributed optimizers of TensorFlow 1, in graphs and in eager mode.

The optimizers wrap a `tf.compat.v1.train.Optimizer`. TensorFlow 2.21 still has this
class, and runs its graphs in sessions. Optimizers of Keras are in ringjax.keras.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.gradients import (
    GradientBucketReducer,
    GradientSettings,
    divide_gradient,
    group_indices,
    reduce_gradients,
)
from ringjax.tensorflow.tf_types import Gradient, TensorLike, Variable

LegacyOptimizer: TypeAlias = tf.compat.v1.train.Optimizer
_Pairs: TypeAlias = Iterable[tuple[Gradient, tf.Variable]]
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
        """Calls `apply` if the last call reduced the sums, and else `otherwise`.

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


class _WrappedOptimizer(tf.compat.v1.train.Optimizer):
    """An optimizer that leaves the arithmetic to the wrapped optimizer."""

    def __init__(
        self, optimizer: LegacyOptimizer, name: str, use_locking: bool
    ) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer

    @do_not_convert
    def compute_gradients(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Gradient, tf.Variable]]:
        """Calls the wrapped optimizer's method, like all methods of this class."""
        return list(self._optimizer.compute_gradients(*args, **kwargs))

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: _Pairs,
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation:
        return self._optimizer.apply_gradients(
            grads_and_vars, global_step=global_step, name=name
        )

    def get_slot(self, *args: Any, **kwargs: Any) -> tf.Variable:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> list[str]:
        return list(self._optimizer.get_slot_names(*args, **kwargs))

    def variables(self, *args: Any, **kwargs: Any) -> list[tf.Variable]:
        return list(self._optimizer.variables(*args, **kwargs))


class _DistributedOptimizer(_WrappedOptimizer):
    """Reduces gradients in `compute_gradients`; the wrapped optimizer applies them."""

    def __init__(
        self,
        optimizer: LegacyOptimizer,
        settings: GradientSettings,
        use_locking: bool = False,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
    ) -> None:
        super().__init__(optimizer, settings.name, use_locking)
        self._reducer = GradientBucketReducer(settings)
        self._agg_helper: LocalAggregation | None = None
        if backward_passes_per_step > 1:
            self._agg_helper = LocalAggregation(
                passes=backward_passes_per_step,
                reduce=self._reducer,
                sparse_as_dense=settings.sparse_as_dense,
                average=average_aggregated_gradients,
                name=settings.name,
            )

    def register_local_var(self, var: tf.Variable) -> None:
        """Makes a variable local: its gradients are not reduced."""
        self._reducer.register_local(var)

    @do_not_convert
    def compute_gradients(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Gradient, tf.Variable]]:
        """Computes gradients with the wrapped optimizer, and reduces them."""
        pairs = super().compute_gradients(*args, **kwargs)
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        if self._agg_helper is not None:
            reduced = self._agg_helper.compute_gradients(gradients, variables)
        else:
            reduced = self._reducer(gradients, variables)
        return list(zip(reduced, variables, strict=True))

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: _Pairs,
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation | None:
        """Applies gradients, or only counts the step while gradients are added up."""
        pairs = list(grads_and_vars)

        def apply() -> tf.Operation:
            return super(_DistributedOptimizer, self).apply_gradients(
                pairs, global_step=global_step, name=name
            )

        def count() -> tf.Operation | None:
            return None if global_step is None else global_step.assign_add(1)

        if self._agg_helper is None:
            return apply()
        gradients = [gradient for gradient, _ in pairs]
        return self._agg_helper.apply_gradients(apply, count, gradients)


class _DistributedAdasumOptimizer(_WrappedOptimizer):
    """Applies gradients on each rank alone, and combines the ranks' steps by Adasum.

    The ranks combine the sum of every `backward_passes_per_step` steps.

    References:
        S. Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020.
    """

    def __init__(
        self,
        optimizer: LegacyOptimizer,
        settings: GradientSettings,
        use_locking: bool = False,
        backward_passes_per_step: int = 1,
    ) -> None:
        super().__init__(optimizer, settings.name, use_locking)
        self._settings = settings
        self._passes = backward_passes_per_step
        self._steps: tf.Variable | None = None
        self._starts: dict[Hashable, tf.Variable] = {}

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: _Pairs,
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation:
        """Makes a step of this rank, and in some steps combines the steps of all ranks.

        A graph orders reads and writes of variables only by control dependencies.
        """
        pairs = list(grads_and_vars)
        moved = [v for gradient, v in pairs if gradient is not None]
        steps = self._create_variables(moved)
        starts = [self._starts[v.ref()] for v in moved]
        before = steps.read_value()

        def keep_starts() -> tf.Operation:
            # The value of a reference variable of TensorFlow 1 shares the variable's
            # memory, which the step below changes. DeepCopy makes a copy.
            copies = [tf.raw_ops.DeepCopy(x=v.read_value()) for v in moved]
            return tf.group(*(s.assign(c) for s, c in zip(starts, copies, strict=True)))

        with tf.control_dependencies([before]):
            kept = tf.cond(tf.equal(before, 0), keep_starts, tf.no_op)
        with tf.control_dependencies(_as_dependencies(kept)):
            stepped = super().apply_gradients(pairs, global_step=global_step, name=name)

        with tf.control_dependencies(_as_dependencies(stepped)):
            ends = [v.read_value() for v in moved]

            def combine() -> list[tf.Tensor]:
                return self._combine_deltas(moved, starts, ends)

            def keep_ends() -> list[tf.Tensor]:
                return [tf.identity(end) for end in ends]

            if self._passes > 1:
                is_last = tf.equal(before % self._passes, self._passes - 1)
                values = tf.cond(is_last, combine, keep_ends)
                values = [values] if tf.is_tensor(values) else list(values)
            else:
                values = combine()
        # Assign outside of the branches, because a branch cannot assign to a reference
        # variable of TensorFlow 1.
        written = [v.assign(value) for v, value in zip(moved, values, strict=True)]
        with tf.control_dependencies(written):
            return tf.group(steps.assign_add(1))

    def _combine_deltas(
        self, moved: list[tf.Variable], starts: list[tf.Variable], ends: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the new values of all ranks' variables, and stores them as starts."""
        deltas = [
            end - start.read_value() for end, start in zip(ends, starts, strict=True)
        ]
        groups = group_indices(self._settings.groups, deltas, moved)
        reduced = reduce_gradients(deltas, groups, self._settings)
        pairs = zip(starts, reduced, strict=True)
        return [
            tf.identity(start.assign(start.read_value() + delta))
            for start, delta in pairs
        ]

    def _create_variables(self, variables: list[tf.Variable]) -> tf.Variable:
        """Creates the step counter, which it returns, and a start for each variable."""
        with tf.init_scope():
            if self._steps is None:
                self._steps = _create_variable(tf.zeros((), tf.int64), "step_count")
            for variable in variables:
                if variable.ref() not in self._starts:
                    zeros = tf.zeros(variable.shape, variable.dtype.base_dtype)
                    start = _create_variable(zeros, "delta_start")
                    self._starts[variable.ref()] = start
        return self._steps


def _create_variable(value: tf.Tensor, name: str) -> tf.Variable:
    return tf.compat.v1.Variable(
        value, trainable=False, name=name, dtype=value.dtype, use_resource=True
    )


def _as_dependencies(operation: tf.Operation | None) -> list[tf.Operation]:
    # In eager mode there is no operation to wait for.
    return [] if operation is None else [operation]
