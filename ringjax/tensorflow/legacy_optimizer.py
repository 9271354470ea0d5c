"""Distributed optimizers of TensorFlow 1, in graphs and in eager mode.

The optimizers wrap a `tf.compat.v1.train.Optimizer`. TensorFlow 2.21 still has this
class, and runs its graphs in sessions. Optimizers of Keras are in ringjax.keras.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeAlias

import tensorflow as tf

from ringjax.tensorflow.aggregation import LocalAggregation
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.gradients import (
    GradientBucketReducer,
    GradientSettings,
    group_indices,
    reduce_gradients,
)
from ringjax.tensorflow.tf_types import Gradient

LegacyOptimizer: TypeAlias = tf.compat.v1.train.Optimizer
_Pairs: TypeAlias = Iterable[tuple[Gradient, tf.Variable]]


class _WrappedOptimizer(tf.compat.v1.train.Optimizer):
    """An optimizer whose methods call the methods of the wrapped optimizer."""

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
    """Updates variables on each rank locally, and combines the changes by Adasum.

    Each call updates this rank's variables. After every `backward_passes_per_step`
    calls, the ranks combine the changes since they last did so.

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

        Control dependencies order the reads and writes of variables in a graph.
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
        """Returns the variables' new values; stores these values as the next starts."""
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
        """Returns the step counter; creates a start value for each variable."""
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
    # In eager mode `operation` is None, and there is nothing to wait for.
    return [] if operation is None else [operation]
