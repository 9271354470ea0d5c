"""Distributed optimizers of TensorFlow 1, in its graphs and eagerly.

`tf.compat.v1.train.Optimizer` and its subclasses; those of Keras are in ringjax.keras.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ringjax.ops import Adasum
from ringjax.tensorflow.aggregation import LocalAggregation
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.gradients import (
    GradientReducer,
    GradientSettings,
    group_indices,
    reduce_gradients,
)

LegacyOptimizer: Any = tf.compat.v1.train.Optimizer
_Pairs = Iterable[tuple[Any, Any]]


class _Wrapper(tf.compat.v1.train.Optimizer):
    """An optimizer that leaves the arithmetic to another one."""

    def __init__(self, optimizer: Any, name: str, use_locking: bool) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer

    @do_not_convert
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the same method of the wrapped optimizer."""
        return list(self._optimizer.compute_gradients(*args, **kwargs))

    @do_not_convert
    def apply_gradients(
        self, grads_and_vars: _Pairs, global_step: Any = None, name: Any = None
    ) -> Any:
        """As the same method of the wrapped optimizer."""
        return self._optimizer.apply_gradients(
            grads_and_vars, global_step=global_step, name=name
        )

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As the same method of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As the same method of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As the same method of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


class _DistributedOptimizer(_Wrapper):
    """Reduces gradients when they have been computed."""

    def __init__(
        self,
        optimizer: Any,
        settings: GradientSettings,
        use_locking: bool = False,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
    ) -> None:
        super().__init__(optimizer, settings.name, use_locking)
        self._reduction = GradientReducer(settings)
        self._agg_helper: LocalAggregation | None = None
        if backward_passes_per_step > 1:
            self._agg_helper = LocalAggregation(
                passes=backward_passes_per_step,
                reduce=self._reduction,
                sparse_as_dense=settings.sparse_as_dense,
                average=average_aggregated_gradients,
                name=settings.name,
            )

    def register_local_var(self, var: Any) -> None:
        """The gradients of this variable are this rank's own, and are not reduced."""
        self._reduction.register_local(var)

    @do_not_convert
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Computes gradients as the wrapped optimizer, and reduces them."""
        pairs = super().compute_gradients(*args, **kwargs)
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        if self._agg_helper is not None:
            reduced = self._agg_helper.compute_gradients(gradients, variables)
        else:
            reduced = self._reduction(gradients, variables)
        return list(zip(reduced, variables, strict=True))

    @do_not_convert
    def apply_gradients(
        self, grads_and_vars: _Pairs, global_step: Any = None, name: Any = None
    ) -> Any:
        """Applies them, or only counts the step while gradients are added up."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return super(_DistributedOptimizer, self).apply_gradients(
                pairs, global_step=global_step, name=name
            )

        def count() -> Any:
            return None if global_step is None else global_step.assign_add(1)

        if self._agg_helper is None:
            return apply()
        gradients = [gradient for gradient, _ in pairs]
        return self._agg_helper.apply_gradients(apply, count, gradients)


class _DistributedAdasumOptimizer(_Wrapper):
    """Lets the wrapped optimizer step alone, and combines by Adasum how far it came.

    S. Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020.
    """

    def __init__(
        self,
        optimizer: Any,
        settings: GradientSettings,
        use_locking: bool = False,
        backward_passes_per_step: int = 1,
    ) -> None:
        super().__init__(optimizer, settings.name, use_locking)
        self._settings = settings
        self._passes = backward_passes_per_step
        self._steps: Any = None
        self._starts: dict[Any, Any] = {}

    @do_not_convert
    def apply_gradients(
        self, grads_and_vars: _Pairs, global_step: Any = None, name: Any = None
    ) -> Any:
        """Steps; every `backward_passes_per_step` steps the ranks come together."""
        pairs = list(grads_and_vars)
        moved = [v for gradient, v in pairs if gradient is not None]
        self._create_variables(moved)
        starts = [self._starts[v.ref()] for v in moved]
        before = self._steps.read_value()

        def begin() -> Any:
            # Copies: reading an old kind of variable shares the memory it changes in.
            copies = [tf.raw_ops.DeepCopy(x=v.read_value()) for v in moved]
            return tf.group(*(s.assign(c) for s, c in zip(starts, copies, strict=True)))

        with tf.control_dependencies([before]):
            begun = tf.cond(tf.equal(before, 0), begin, tf.no_op)
        with tf.control_dependencies(_known(begun)):
            stepped = super().apply_gradients(pairs, global_step=global_step, name=name)

        with tf.control_dependencies(_known(stepped)):
            ends = [v.read_value() for v in moved]

            def meet() -> list[Any]:
                return self._combine_deltas(moved, starts, ends)

            def go_on() -> list[Any]:
                return [tf.identity(end) for end in ends]

            if self._passes > 1:
                is_last = tf.equal(before % self._passes, self._passes - 1)
                there = tf.cond(is_last, meet, go_on)
                there = [there] if tf.is_tensor(there) else list(there)
            else:
                there = meet()
        # Outside of the branch, which has no references to old kinds of variables.
        written = [v.assign(t) for v, t in zip(moved, there, strict=True)]
        with tf.control_dependencies(written):
            return tf.group(self._steps.assign_add(1))

    def _combine_deltas(
        self, moved: list[Any], starts: list[Any], ends: list[Any]
    ) -> list[Any]:
        """Where all ranks go on from."""
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

    def _create_variables(self, variables: list[Any]) -> None:
        """Where each variable was when the ranks were together last, and a counter."""
        with tf.init_scope():
            if self._steps is None:
                self._steps = _variable(tf.zeros((), tf.int64), "step_count")
            for variable in variables:
                if variable.ref() not in self._starts:
                    zeros = tf.zeros(variable.shape, variable.dtype.base_dtype)
                    start = _variable(zeros, "delta_start")
                    self._starts[variable.ref()] = start


def _variable(value: Any, name: str) -> Any:
    return tf.compat.v1.Variable(
        value, trainable=False, name=name, dtype=value.dtype, use_resource=True
    )


def _known(operation: Any) -> list[Any]:
    """What a graph waits for; in eager mode there is nothing."""
    return [] if operation is None else [operation]


def distributed(
    optimizer: Any,
    make_settings: Callable[[str], GradientSettings],
    name: str | None,
    use_locking: bool,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
) -> Any:
    """Wraps an optimizer of TensorFlow 1; see `optimizer.DistributedOptimizer`."""
    kind = type(optimizer).__name__
    settings = make_settings(name or f"Distributed{kind}")
    if settings.op == Adasum:
        if name is None:
            settings = make_settings(f"DistributedDelta{kind}")
        return _DistributedAdasumOptimizer(
            optimizer, settings, use_locking, backward_passes_per_step
        )
    return _DistributedOptimizer(
        *(optimizer, settings, use_locking, backward_passes_per_step),
        average_aggregated_gradients,
    )
