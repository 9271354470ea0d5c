"""DistributedOptimizer: any Keras optimizer, on gradients reduced over all ranks.

Behavior, names and errors are Horovod's, and reducer.py reduces the gradients. The
class of the result is a subclass of the plain optimizer's class and has the name of
that class, so that a program can load a saved model with and without ringjax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras

from ringjax.horovod.functions import local_variables
from ringjax.horovod.gradient_options import Groups, check_groups, check_reduction
from ringjax.keras import keras_patches
from ringjax.keras.backends import ReductionOptions, backend
from ringjax.keras.keras_types import Compressor, Layer, Optimizer, Tensor, Variable
from ringjax.keras.reducer import OptimizerOptions, OptimizerReducer
from ringjax.ops import Average, ReduceOp
from ringjax.world.process_set import ProcessSet, global_process_set


class AggregationCounter(NamedTuple):
    """Horovod's attribute `_agg_helper` of an optimizer, which programs read.

    `counter` is the number of passes since the last step, a variable of the optimizer.
    """

    counter: Variable


# A type checker sees this class in place of the plain optimizer's class, which is the
# second base of each class that `_distributed` makes.
_PlainOptimizer: Any = object


class _DistributedOptimizer(_PlainOptimizer):
    """The first base of a distributed optimizer's class, before the plain class."""

    _ringjax_options: OptimizerOptions  # the options, an attribute of the subclass
    _reducer: OptimizerReducer
    built: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reducer = OptimizerReducer(self._ringjax_options, self._var_key)

    def register_local_var(self, var: Variable) -> None:
        """Excludes the gradient of a variable from the reduction.

        With `scale_local_gradients`, the gradient is divided by the number of ranks.
        """
        self._reducer.register_local_var(var)

    # -- steps of Keras 3 --------------------------------------------------------------

    def apply(
        self,
        grads: Sequence[Tensor],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> None:
        """Reduces the gradients, then makes the optimizer's step with them."""
        reducer = self._reducer
        plain: Any = super()
        if reducer.bypassed or len(grads) == 0:
            plain.apply(grads, trainable_variables)
            return
        given = trainable_variables
        variables = self._trainable_variables if given is None else list(given)
        if given is not None and not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
            self.built = True
        grads = list(grads)
        with reducer.bypass():
            if reducer.consume_reduced(grads):
                plain.apply(grads, given)
            elif reducer.counter is not None:
                self._add_pass(grads, variables)
            elif self.gradient_accumulation_steps:
                reducer.deferred = variables
                try:
                    plain.apply(grads, given)
                finally:
                    reducer.deferred = None
            else:
                plain.apply(reducer.reduce(grads, variables), given)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Tensor, Variable]], **kwargs: Any
    ) -> object:
        """Calls `apply`; also accepts the arguments of Keras 2.

        With ``experimental_aggregate_gradients=False`` or
        ``skip_gradients_aggregation=True`` the gradients are not reduced.
        """
        pairs = list(grads_and_vars)
        unreduced = kwargs.pop("skip_gradients_aggregation", False) or not kwargs.pop(
            "experimental_aggregate_gradients", True
        )
        kwargs.pop("name", None)
        if not unreduced or self._reducer.options.passes > 1:
            return super().apply_gradients(pairs, **kwargs)
        with self._reducer.bypass():
            return super().apply_gradients(pairs, **kwargs)

    def _backend_apply_gradients(
        self, grads: Sequence[Tensor], trainable_variables: Sequence[Variable]
    ) -> None:
        # Keras has left out the variables that have no gradient.
        if self._reducer.deferred is not None:
            self._reducer.deferred = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Sequence[Tensor]) -> list[Tensor]:
        # Keras calls this method between the accumulation of gradients and the update,
        # so this is the place to reduce the accumulated gradients once for each update.
        reducer = self._reducer
        if (variables := reducer.deferred) is not None and not reducer.is_alone():
            due = (self._iterations + 1) % self.gradient_accumulation_steps == 0
            grads = backend().change_on_update(
                due, lambda summed: reducer.reduce(summed, variables), list(grads)
            )
        clipped: list[Tensor] = super()._clip_gradients(grads)
        return clipped

    # -- several passes for one step ---------------------------------------------------

    def build(self, variables: Sequence[Variable]) -> None:
        """Makes the optimizer's variables, and variables for the sums of gradients."""
        super().build(variables)
        self._add_accumulators(variables)

    def _add_accumulators(self, variables: Sequence[Variable]) -> None:
        reducer = self._reducer
        if reducer.options.passes == 1 or reducer.counter is not None:
            return
        reducer.accumulators = [
            self.add_variable_from_reference(variable, name="aggregated")
            for variable in variables
        ]
        reducer.counter = self.add_variable(
            shape=(), dtype="int32", name="aggregation_counter"
        )

    @property
    def _agg_helper(self) -> AggregationCounter | None:
        counter = self._reducer.counter
        return None if counter is None else AggregationCounter(counter)

    def _add_pass(self, grads: Sequence[Tensor], variables: Sequence[Variable]) -> None:
        """Adds gradients to sums. After `passes` calls, makes a step with the sums."""
        reducer = self._reducer
        plain: Any = super()
        passes = reducer.options.passes
        dense = reducer.to_dense(grads)
        used = [i for i, gradient in enumerate(dense) if gradient is not None]
        if not used:
            raise ValueError("No gradients provided for any variable.")
        variables = [variables[i] for i in used]
        sums = [reducer.accumulators[self._get_variable_index(v)] for v in variables]
        for total, i in zip(sums, used, strict=True):
            total.assign(total + keras.ops.cast(dense[i], total.dtype))
        reducer.counter.assign_add(1)

        def step() -> None:
            factor = 1.0 / passes if reducer.options.average_passes else 1.0
            totals = [
                keras.ops.convert_to_tensor(total) * keras.ops.cast(factor, total.dtype)
                for total in sums
            ]
            plain.apply(reducer.reduce(totals, variables), variables)
            for total in sums:
                total.assign(keras.ops.zeros(total.shape, total.dtype))
            reducer.counter.assign(keras.ops.zeros((), "int32"))

        def skip() -> None:
            self._iterations.assign_add(1)

        changed = [*self.variables, *self._trainable_variables]
        backend().cond(keras.ops.equal(reducer.counter, passes), step, skip, changed)

    # A file contains only the variables of the plain optimizer, so that a program
    # without ringjax can load the file, too.

    def save_own_variables(self, store: Any) -> None:
        """Saves the variables that the plain optimizer has."""
        if self._reducer.counter is None:
            super().save_own_variables(store)
            return
        for i, variable in enumerate(self._plain_variables()):
            store[str(i)] = keras.ops.convert_to_numpy(variable)

    def load_own_variables(self, store: Any) -> None:
        """Loads the variables that the plain optimizer has."""
        variables = self._plain_variables()
        if self._reducer.counter is None or len(store.keys()) != len(variables):
            super().load_own_variables(store)
            return
        for i, variable in enumerate(variables):
            variable.assign(store[str(i)])

    def _plain_variables(self) -> list[Variable]:
        reducer = self._reducer
        added = {id(v) for v in (*reducer.accumulators, reducer.counter)}
        return [v for v in self.variables if id(v) not in added]

    # -- steps of Keras 2, which programs for Horovod call -----------------------------

    def get_gradients(self, loss: Tensor, params: Sequence[Variable]) -> list[Tensor]:
        """Returns reduced gradients, which the plain class's method computes."""
        return self._allreduce(super().get_gradients(loss, params), params)

    def _allreduce(
        self, grads: Sequence[Tensor], variables: Sequence[Variable]
    ) -> list[Tensor]:
        """Returns reduced gradients, which `apply_gradients` does not reduce again."""
        if self._reducer.options.passes > 1:
            # `apply_gradients` adds the gradients up and reduces the sums.
            return list(grads)
        return self._reducer.reduce_for_apply(list(grads), list(variables))

    def _compute_gradients(
        self,
        loss: Tensor | Callable[[], Tensor],
        var_list: Any,
        grad_loss: Tensor | None = None,
        tape: Any = None,
    ) -> list[tuple[Tensor, Variable]]:
        """Returns pairs of reduced gradients and variables."""
        variables = keras.tree.flatten(var_list)
        grads = backend().compute_gradients(loss, variables, grad_loss, tape)
        return list(zip(self._allreduce(grads, variables), variables, strict=True))

    compute_gradients = _compute_gradients


class _DistributedLossScaleOptimizer(_PlainOptimizer):
    """A LossScaleOptimizer around a distributed optimizer.

    All ranks agree whether the gradients are finite; see keras_patches.py.
    """

    def register_local_var(self, var: Variable) -> None:
        """Calls `register_local_var` of the inner optimizer."""
        self.inner_optimizer.register_local_var(var)

    @property
    def _reducer(self) -> OptimizerReducer:
        found: OptimizerReducer = self.inner_optimizer._reducer
        return found


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """Returns the optimizer with an `apply` that first reduces over all ranks.

    Use the result with `model.compile` or in your own training loop. With JAX the
    reduction is compiled into the train step. If Keras accumulates gradients
    (`gradient_accumulation_steps`), the accumulated gradients are reduced.

    Args:
        optimizer: any Keras optimizer, also a LossScaleOptimizer. The result shares the
            variables of this optimizer, and is an instance of its class.
        name: the name of the gradients in messages, the same on all ranks. If it is
            None, the name is "Distributed" and the name of the optimizer's class.
        device_dense, device_sparse: accepted and ignored.
        compression: the form in which gradients are sent, see `Compression`; None means
            no compression.
        sparse_as_dense: whether sparse gradients are sent as dense tensors.
        gradient_predivide_factor: only allowed with Average. Gradients are divided by
            this factor before the sum; the sum is multiplied by the factor and divided
            by the size.
        op: Average, Sum or Adasum.
        backward_passes_per_step: the number of calls of `apply` for one step. Each rank
            adds up the gradients of these calls. `iterations` counts the calls.
        average_aggregated_gradients: whether these sums are divided by the number of
            passes.
        num_groups: Horovod's former name of `groups`, if that is an integer.
        groups: the number of operations into which all gradients are put, or lists of
            variables, each of which becomes one operation. It has no effect with JAX.
        process_set: the ranks that take part. On other ranks the result behaves like
            `optimizer`.
        scale_local_gradients: whether gradients of local variables are divided by the
            number of ranks.

    Raises:
        ValueError: an argument is wrong; the text is Horovod's if Horovod has one.
        TypeError: `optimizer` is no Keras optimizer, or a DistributedOptimizer already.

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
    if keras_patches.reducer_of(optimizer) is not None:
        raise TypeError("optimizer is a DistributedOptimizer already")
    check_reduction(op, gradient_predivide_factor, backward_passes_per_step)
    if compression is None:
        compression = backend().compression.none
    options = OptimizerOptions(
        groups=check_groups(groups, num_groups, "variables", stacklevel=2),
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        scale_local=scale_local_gradients,
        reduction=ReductionOptions(
            name=name or f"Distributed{type(optimizer).__name__}",
            op=ReduceOp(op),
            compression=compression,
            predivide=float(gradient_predivide_factor),
            process_set=process_set,
            sparse_as_dense=sparse_as_dense,
        ),
    )
    keras_patches.apply_patches()
    return _distributed(optimizer, options)


def PartialDistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Layer | Sequence[Layer] | None = None,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """Returns a `DistributedOptimizer` that does not reduce gradients of some layers.

    Args:
        local_layers: a built layer, or a list of built layers. Each rank trains the
            variables of these layers on its own.
        optimizer, ...: as for `DistributedOptimizer`.

    Raises:
        ValueError: as `DistributedOptimizer`; also if `local_layers` are no layers.

    Example:
        >>> import keras, ringjax.keras as hvd
        >>> hvd.init()
        >>> layer = keras.layers.Dense(2)
        >>> layer.build((None, 3))
        >>> optimizer = keras.optimizers.SGD(0.1)
        >>> _ = hvd.PartialDistributedOptimizer(optimizer, local_layers=[layer])
    """
    # All other arguments are arguments of `DistributedOptimizer`.
    options = {key: value for key, value in locals().items() if key != "local_layers"}
    expected = "type keras.layers.Layer"
    local = local_variables(local_layers, keras.layers.Layer, expected)
    result = DistributedOptimizer(**options)
    for variable in local:
        result.register_local_var(variable)
    return result


def _distributed(optimizer: Optimizer, options: OptimizerOptions) -> Optimizer:
    """Returns an object of a new subclass that shares the state of `optimizer`."""
    plain_class = type(optimizer)
    scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    base = _DistributedLossScaleOptimizer if scaling else _DistributedOptimizer
    namespace = {
        "__module__": _public_module(plain_class),
        "__doc__": plain_class.__doc__,
        "_ringjax_options": options,
    }
    subclass: Any = type(plain_class.__name__, (base, plain_class), namespace)
    result = subclass.__new__(subclass)
    vars(result).update(vars(optimizer))
    if scaling:
        result.inner_optimizer = _distributed(optimizer.inner_optimizer, options)
        return result
    result._reducer = OptimizerReducer(options, result._var_key)
    if result.built:
        result._add_accumulators(result._trainable_variables)
    return result


def _public_module(plain_class: type) -> str:
    """Returns the module in which a program without ringjax finds a saved class."""
    known = getattr(keras.optimizers, plain_class.__name__, None)
    if known in plain_class.__mro__:
        return "keras.optimizers"
    return plain_class.__module__
