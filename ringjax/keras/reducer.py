"""OptimizerReducer: reduces the gradients of a Keras optimizer once in each step.

It passes the gradients of all but local variables to the backend, which reduces them.
optimizer.py calls it, and reads from it which gradients are reduced already.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import keras

from ringjax import runtime
from ringjax.horovod.functions import split_list
from ringjax.keras.backends import ReductionOptions, backend
from ringjax.keras.keras_types import Tensor, Variable
from ringjax.ops import Adasum, Average, Sum

Groups = Sequence[Sequence[Variable]] | int | None


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


def check_reduction(op: int, predivide: float, passes: int) -> None:
    """Checks arguments of `DistributedOptimizer`.

    Raises:
        ValueError: a bad argument. Texts are Horovod's, if Horovod has a text.
    """
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op must be Average, Sum or Adasum, not {op!r}")
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not predivide > 0.0:
        raise ValueError("gradient_predivide_factor must be > 0")
    if isinstance(passes, bool) or not (isinstance(passes, int) and passes > 0):
        raise ValueError("backward_passes_per_step must be > 0")


def check_groups(groups: Groups, num_groups: int) -> Groups:
    """Returns the groups, which Horovod's former argument `num_groups` may replace.

    Raises:
        ValueError: `groups` is neither a positive integer nor a list of lists.
    """
    if num_groups != 0:
        text = "Parameter `num_groups` has been replaced by `groups`."
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if isinstance(groups, list | tuple):
        valid = all(isinstance(group, list | tuple) for group in groups)
    elif isinstance(groups, int):
        valid = not isinstance(groups, bool) and groups > 0
    else:
        valid = groups is None
    if not valid:
        raise ValueError(
            "groups should be a non-negative integer or a list of list of variables."
        )
    return groups


class OptimizerReducer:
    """Reduces the gradients of one optimizer.

    Args:
        options: the options of the optimizer's class.
        key_of: returns the key by which the optimizer identifies a variable.

    Attributes:
        bypassed: whether the methods of the optimizer behave as Keras' own methods. The
            code of Keras calls these methods, too, and must not reduce a second time.
        deferred: the variables whose gradients are reduced when Keras has accumulated
            them; None if Keras does not accumulate.
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
        """Makes a context in which `bypassed` is set."""
        before, self.bypassed = self.bypassed, True
        try:
            yield
        finally:
            self.bypassed = before

    def is_alone(self) -> bool:
        """Returns whether there is no other rank to reduce gradients with."""
        process_set = self.options.reduction.process_set
        if not process_set.included():
            return True
        # In an elastic job, more ranks may join while the same compiled step is used.
        return process_set.size() == 1 and not runtime.elastic()

    def reduce(
        self, gradients: Sequence[Tensor], variables: Sequence[Variable]
    ) -> list[Tensor]:
        """Returns the reduced gradients; None stays None.

        Gradients of local variables are divided by the size instead, if
        `scale_local` is set.
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
        reduced = tensors.reduce(
            [out[i] for i in sent],
            sent,
            [variables[i] for i in sent],
            self._groups(sent, variables),
            options,
        )
        for i, gradient in zip(sent, reduced, strict=True):
            out[i] = gradient
        return out

    def reduce_for_apply(
        self, gradients: Sequence[Tensor], variables: Sequence[Variable]
    ) -> list[Tensor]:
        """Reduces gradients for a program that gives them to `apply_gradients`."""
        self._reduced = self.reduce(gradients, variables)
        return list(self._reduced)

    def consume_reduced(self, gradients: Sequence[Tensor]) -> bool:
        """Returns whether `reduce_for_apply` returned the gradients, True only once."""
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
        """Returns gradients as dense tensors, which can be added up.

        Raises:
            ValueError: a gradient is sparse, and `sparse_as_dense` is not set.
        """
        tensors = backend()
        for gradient in gradients:
            if gradient is None or not tensors.is_sparse(gradient):
                continue
            if not self.options.reduction.sparse_as_dense:
                raise ValueError(
                    "IndexedSlices are not supported when `backward_passes_per_step` > "
                    "1 and `sparse_as_dense` is False."
                )
        return [None if g is None else tensors.to_dense(g) for g in gradients]

    def _groups(
        self, sent: Sequence[int], variables: Sequence[Variable]
    ) -> list[list[int]]:
        """Returns lists of positions in `sent`, each for one operation."""
        groups = self.options.groups
        if groups is None:
            return []
        if isinstance(groups, int):
            return [list(part) for part in split_list(range(len(sent)), groups)]
        position = {self._key_of(variables[i]): k for k, i in enumerate(sent)}
        units = [
            [position[key] for key in map(self._key_of, group) if key in position]
            for group in groups
        ]
        flat = [k for unit in units for k in unit]
        if len(set(flat)) < len(flat):
            raise ValueError("A variable can only appear once in groups.")
        return units
