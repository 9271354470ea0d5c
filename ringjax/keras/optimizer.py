"""DistributedOptimizer: any Keras optimizer, on gradients reduced over all ranks.

Behaviour, names and errors are Horovod's. The result's class is a subclass of the
optimizer's own and has its name, so that models which are saved with it can be loaded
with and without ringjax. Which gradients travel, and how, is in reducer.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from ringjax.horovod.functions import local_variables
from ringjax.keras import keras_patches
from ringjax.keras.backends import backend
from ringjax.keras.reducer import (
    GradientReducer,
    Groups,
    OptimizerOptions,
    check_options,
)
from ringjax.ops import Average
from ringjax.world.process_set import ProcessSet, global_process_set


class AggregationCounter:
    """What Horovod's tests and programs look at: how many passes have been made.

    Attributes:
        counter: a variable of the optimizer.
    """

    def __init__(self, counter: Any) -> None:
        self.counter = counter


_Plain: Any = object  # in an optimizer, the class of Keras that follows


class _DistributedOptimizer(_Plain):
    """What comes before an optimizer's own class; see `DistributedOptimizer`."""

    _ringjax_options: OptimizerOptions  # of the class
    _reducer: GradientReducer
    built: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reducer = GradientReducer(self._ringjax_options, self._var_key)

    def register_local_var(self, var: Any) -> None:
        """Leaves the gradient of a variable to this rank.

        It is divided by the number of ranks, unless `scale_local_gradients` is False.
        """
        self._reducer.register_local_var(var)

    # -- Keras' steps ------------------------------------------------------------------

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduces the gradients, then makes the optimizer's step with them."""
        mine = self._reducer
        plain: Any = super()
        if mine.bypassed or len(grads) == 0:
            plain.apply(grads, trainable_variables)
            return
        given = trainable_variables
        variables = self._trainable_variables if given is None else list(given)
        if given is not None and not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
            self.built = True
        grads = list(grads)
        with mine.bypass():
            if mine.take_reduced(grads):
                plain.apply(grads, given)
            elif mine.counter is not None:
                self._pass(grads, variables)
            elif self.gradient_accumulation_steps:
                mine.deferred = variables
                try:
                    plain.apply(grads, given)
                finally:
                    mine.deferred = None
            else:
                plain.apply(mine.reduce(grads, variables), given)

    def apply_gradients(self, grads_and_vars: Iterable[Any], **kwargs: Any) -> Any:
        """As Keras' own, also with the arguments that it had in Keras 2.

        With ``experimental_aggregate_gradients=False`` or
        ``skip_gradients_aggregation=True`` the gradients are taken as they are.
        """
        pairs = list(grads_and_vars)
        as_they_are = kwargs.pop("skip_gradients_aggregation", False) or not kwargs.pop(
            "experimental_aggregate_gradients", True
        )
        kwargs.pop("name", None)
        if not as_they_are or self._reducer.options.passes > 1:
            return super().apply_gradients(pairs, **kwargs)
        with self._reducer.bypass():
            return super().apply_gradients(pairs, **kwargs)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        if self._reducer.deferred is not None:  # of those that have a gradient
            self._reducer.deferred = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Any) -> Any:
        """Where Keras has accumulated gradients: they travel once for each update."""
        mine = self._reducer
        if (variables := mine.deferred) is not None and not mine.is_alone():
            due = (self._iterations + 1) % self.gradient_accumulation_steps == 0
            grads = backend().change_on_update(
                due, lambda summed: mine.reduce(summed, variables), list(grads)
            )
        return super()._clip_gradients(grads)

    # -- several passes for one step ---------------------------------------------------

    def build(self, variables: Any) -> None:
        """As Keras' own, and the sums of gradients of several passes."""
        super().build(variables)
        self._add_accumulators(variables)

    def _add_accumulators(self, variables: Sequence[Any]) -> None:
        mine = self._reducer
        if mine.options.passes == 1 or mine.counter is not None:
            return
        mine.accumulators = [
            self.add_variable_from_reference(variable, name="aggregated")
            for variable in variables
        ]
        mine.counter = self.add_variable(
            shape=(), dtype="int32", name="aggregation_counter"
        )

    @property
    def _agg_helper(self) -> AggregationCounter | None:
        counter = self._reducer.counter
        return None if counter is None else AggregationCounter(counter)

    def _pass(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Adds gradients up; makes a step with the sums when it is time."""
        mine = self._reducer
        plain: Any = super()
        passes = mine.options.passes
        dense = mine.to_dense(grads)
        used = [i for i, gradient in enumerate(dense) if gradient is not None]
        if not used:
            raise ValueError("No gradients provided for any variable.")
        variables = [variables[i] for i in used]
        sums = [mine.accumulators[self._get_variable_index(v)] for v in variables]
        for total, i in zip(sums, used, strict=True):
            total.assign(total + keras.ops.cast(dense[i], total.dtype))
        mine.counter.assign_add(1)

        def step() -> None:
            factor = 1.0 / passes if mine.options.average_passes else 1.0
            totals = [
                keras.ops.convert_to_tensor(total) * keras.ops.cast(factor, total.dtype)
                for total in sums
            ]
            plain.apply(mine.reduce(totals, variables), variables)
            for total in sums:
                total.assign(keras.ops.zeros(total.shape, total.dtype))
            mine.counter.assign(keras.ops.zeros((), "int32"))

        def wait() -> None:
            self._iterations.assign_add(1)

        touched = [*self.variables, *self._trainable_variables]
        backend().cond(keras.ops.equal(mine.counter, passes), step, wait, touched)

    def save_own_variables(self, store: Any) -> None:
        """As Keras' own: a file has what the plain optimizer would have."""
        if self._reducer.counter is None:
            super().save_own_variables(store)
            return
        for i, variable in enumerate(self._lasting_variables()):
            store[str(i)] = keras.ops.convert_to_numpy(variable)

    def load_own_variables(self, store: Any) -> None:
        """As Keras' own."""
        lasting = self._lasting_variables()
        if self._reducer.counter is None or len(store.keys()) != len(lasting):
            super().load_own_variables(store)
            return
        for i, variable in enumerate(lasting):
            variable.assign(store[str(i)])

    def _lasting_variables(self) -> list[Any]:
        mine = self._reducer
        bypassed = {id(v) for v in (*mine.accumulators, mine.counter)}
        return [v for v in self.variables if id(v) not in bypassed]

    # -- Keras 2's steps, which Horovod's users know -----------------------------------

    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        """The reduced gradients of a loss, if the optimizer's class computes some."""
        return self._allreduce(super().get_gradients(loss, params), params)

    def _allreduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduced gradients, which `apply_gradients` then takes as they are."""
        if self._reducer.options.passes > 1:
            return list(grads)  # they are added up, and travel, when they are applied
        return self._reducer.reduce_for_apply(list(grads), list(variables))

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """Pairs of reduced gradients and variables."""
        variables = keras.tree.flatten(var_list)
        grads = backend().compute_gradients(loss, variables, grad_loss, tape)
        return list(zip(self._allreduce(grads, variables), variables, strict=True))

    compute_gradients = _compute_gradients


class _DistributedLossScaleOptimizer(_Plain):
    """A LossScaleOptimizer around a distributed optimizer.

    The check whether gradients are finite is the same on all ranks, as for those that
    Keras puts around an optimizer itself; see keras_patches.py.
    """

    def register_local_var(self, var: Any) -> None:
        """As that of the optimizer inside."""
        self.inner_optimizer.register_local_var(var)

    @property
    def _reducer(self) -> GradientReducer:
        found: GradientReducer = self.inner_optimizer._reducer
        return found


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns the optimizer with an `apply` that first reduces over all ranks.

    For `model.compile`, and for loops of one's own. With JAX the reduction is compiled
    into the train step. Keras' own `gradient_accumulation_steps` works as well: what
    has been accumulated travels once.

    Args:
        optimizer: any Keras optimizer, a LossScaleOptimizer included. It shares its
            variables with the result, whose class is a subclass of its class.
        name: stands for the gradients in messages; None: "Distributed" and the
            optimizer's name. The same on all ranks.
        device_dense: accepted and ignored, as is `device_sparse`.
        device_sparse: see there.
        compression: what gradients travel as, see `Compression`; None: as they are.
        sparse_as_dense: sparse gradients travel as dense ones.
        gradient_predivide_factor: with Average: gradients are divided by it before the
            sum, and multiplied by it and divided by the size after.
        op: Average, Sum or Adasum.
        backward_passes_per_step: how many calls make one step; gradients add up locally
            until then, and `iterations` counts the calls.
        average_aggregated_gradients: whether they are divided by that number.
        num_groups: Horovod's former name of an integer for `groups`.
        groups: into how many operations to put all gradients, or the lists of variables
            that are put into one each. With JAX all are one call anyway.
        process_set: the ranks that take part. On others the result is like `optimizer`.
        scale_local_gradients: whether gradients of local variables are divided by the
            number of ranks.

    Raises:
        ValueError: a bad argument; the text is Horovod's where Horovod has one.
        TypeError: it is no Keras optimizer, or a DistributedOptimizer already.

    Example:
        >>> import keras, ringjax.keras as hvd
        >>> hvd.init()
        >>> optimizer = keras.optimizers.SGD(0.1 * hvd.size())
        >>> isinstance(hvd.DistributedOptimizer(optimizer), keras.optimizers.SGD)
        True
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, expected one of Keras"
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "_reducer", None) is not None:
        raise TypeError("optimizer is a DistributedOptimizer already")
    options = check_options(
        name or f"Distributed{type(optimizer).__name__}",
        backend().compression.none if compression is None else compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    keras_patches.apply_patches()
    return _distributed(optimizer, options)


def PartialDistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A `DistributedOptimizer` that leaves the variables of some layers to each rank.

    Args:
        local_layers: a layer, or a list of layers, which have been built.
        optimizer, ...: as for `DistributedOptimizer`.

    Raises:
        ValueError: as there, or `local_layers` are no layers.

    Example:
        >>> import keras, ringjax.keras as hvd
        >>> hvd.init()
        >>> layer = keras.layers.Dense(2)
        >>> layer.build((None, 3))
        >>> optimizer = keras.optimizers.SGD(0.1)
        >>> _ = hvd.PartialDistributedOptimizer(optimizer, local_layers=[layer])
    """
    # The rest are the arguments of the other one.
    options = {key: value for key, value in locals().items() if key != "local_layers"}
    kind = keras.layers.Layer
    local = local_variables(local_layers, kind, "type keras.layers.Layer")
    result = DistributedOptimizer(**options)
    for variable in local:
        result.register_local_var(variable)
    return result


def _distributed(optimizer: Any, options: OptimizerOptions) -> Any:
    """An object with the state of `optimizer`, of a subclass of its class."""
    base = type(optimizer)
    scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    kind = _DistributedLossScaleOptimizer if scaling else _DistributedOptimizer
    about = {
        "__module__": _public_module(base),
        "__doc__": base.__doc__,
        "_ringjax_options": options,
    }
    made: Any = type(base.__name__, (kind, base), about)
    result = made.__new__(made)
    vars(result).update(vars(optimizer))
    if scaling:
        result.inner_optimizer = _distributed(optimizer.inner_optimizer, options)
        return result
    result._reducer = GradientReducer(options, result._var_key)
    if result.built:
        result._add_accumulators(result._trainable_variables)
    return result


def _public_module(base: type[Any]) -> str:
    """Where a program without ringjax finds the class of a saved optimizer."""
    known = getattr(keras.optimizers, base.__name__, None)
    return "keras.optimizers" if known in base.__mro__ else base.__module__
