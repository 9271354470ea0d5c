"""OptimizerReducer: reduces the gradients of a Keras optimizer once in each step.

The reducer passes the gradients of all but local variables to the backend. The classes
of optimizer.py call the reducer, and keep in it which gradients are reduced already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import keras

from ringjax import runtime
from ringjax.horovod.gradient_options import Groups, group_indices
from ringjax.keras.backends import ReductionOptions, backend
from ringjax.keras.keras_types import Tensor, Variable


class OptimizerOptions(NamedTuple):
    """The checked arguments of `DistributedOptimizer`.

    Attributes:
        reduction: how gradients are reduced.
        groups: the number of operations, or lists of variables.
        passes: the argument `backward_passes_per_step`.
        average_passes: whether the gradients of the passes are averaged, not added.
        scale_local: whether gradients of local variables are divided by the size.
    """

    reduction: ReductionOptions
    groups: Groups
    passes: int
    average_passes: bool
    scale_local: bool


class OptimizerReducer:
    """Reduces the gradients of one optimizer, as its `OptimizerOptions` say.

    `key_of` returns the key by which the optimizer identifies a variable.

    Attributes:
        bypassed: whether the methods of the optimizer behave like Keras' own methods.
            Keras' code calls these methods, too, and must not reduce a second time.
        deferred: the variables whose accumulated gradients will be reduced; None if
            Keras does not accumulate gradients.
        counter: the number of passes since the last step, a variable of the optimizer.
            It is None before the optimizer is built, or if each pass is a step.
        accumulators: the sums of the gradients since the last step.
    """

    def __init__(
        self, options: OptimizerOptions, key_of: Callable[[Variable], Hashable]
    ) -> None:
        self.options = options
        self.bypassed = False
        self.deferred: list[Variable] | None = None
        self.counter: Variable = None
        self.accumulators: list[Variable] = []
        self._key_of = key_of
        self._local: set[Hashable] = set()
        self._reduced: list[Tensor] = []

    def register_local_var(self, variable: Variable) -> None:
        """Excludes the gradient of a variable from the reduction."""
        self._local.add(self._key_of(variable))

    @contextlib.contextmanager
    def bypass(self) -> Iterator[None]:
        """Sets `bypassed` in a `with` block."""
        before, self.bypassed = self.bypassed, True
        try:
            yield
        finally:
            self.bypassed = before

    def is_alone(self) -> bool:
        """Returns whether no other rank reduces gradients with this rank."""
        process_set = self.options.reduction.process_set
        if not process_set.included():
            return True
        # In an elastic job, more ranks may join while the same compiled step is used.
        return process_set.size() == 1 and not runtime.elastic()

    def reduce(
        self, gradients: Sequence[Tensor], variables: Sequence[Variable]
    ) -> list[Tensor]:
        """Returns the reduced gradients; None stays None.

        Gradients of local variables are not reduced. With `scale_local` they are
        divided by the size.
        """
        out = list(gradients)
        if self.is_alone():
            return out
        tensors, options = backend(), self.options.reduction
        present = [i for i, gradient in enumerate(out) if gradient is not None]
        local = [i for i in present if self._key_of(variables[i]) in self._local]
        if local and self.options.scale_local:
            size = tensors.size(options.process_set)
            for i in local:
                out[i] = out[i] / keras.ops.cast(size, out[i].dtype)
        sent = [i for i in present if i not in set(local)]
        if options.sparse_as_dense:
            for i in sent:
                out[i] = tensors.to_dense(out[i])
        if not sent:
            return out
        own = [variables[i] for i in sent]
        position_of = {self._key_of(variable): k for k, variable in enumerate(own)}
        groups = group_indices(
            self.options.groups, range(len(sent)), position_of, self._key_of
        )
        reduced = tensors.reduce([out[i] for i in sent], sent, own, groups, options)
        for i, gradient in zip(sent, reduced, strict=True):
            out[i] = gradient
        return out

    def reduce_for_apply(
        self, gradients: Sequence[Tensor], variables: Sequence[Variable]
    ) -> list[Tensor]:
        """Reduces gradients that a program passes to `apply_gradients` afterwards."""
        self._reduced = self.reduce(gradients, variables)
        return list(self._reduced)

    def consume_reduced(self, gradients: Sequence[Tensor]) -> bool:
        """Returns whether the gradients are the last result of `reduce_for_apply`.

        A second call with these gradients returns False.
        """
        known = {id(gradient) for gradient in self._reduced if gradient is not None}
        self._reduced = []
        given = [gradient for gradient in gradients if gradient is not None]
        return bool(known) and all(id(gradient) in known for gradient in given)

    def all_true(self, flag: Tensor) -> Tensor:
        """Returns whether a flag is true on all ranks that reduce gradients."""
        if self.is_alone():
            return flag
        return backend().all_true(flag, self.options.reduction.process_set)

    def to_dense(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns gradients as dense tensors, which can be added up."""
        tensors = backend()
        if not self.options.reduction.sparse_as_dense and any(
            gradient is not None and tensors.is_sparse(gradient)
            for gradient in gradients
        ):
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > "
                "1 and `sparse_as_dense` is False."
            )
        return [None if g is None else tensors.to_dense(g) for g in gradients]
