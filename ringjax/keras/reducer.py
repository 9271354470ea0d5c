"""What a distributed optimizer knows: which gradients travel, and how.

The place of this in an optimizer's step is optimizer.py; tensors are the backend's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from ringjax import runtime
from ringjax.horovod.functions import split_list
from ringjax.keras.backends import ReductionOptions, backend
from ringjax.ops import Adasum, Average, ReduceOp, Sum
from ringjax.world.process_set import ProcessSet

Groups = Sequence[Sequence[Any]] | int | None


class OptimizerOptions(NamedTuple):
    """The arguments of `DistributedOptimizer`, check_options.

    Attributes:
        how: what happens to gradients on their way.
        groups: into how many operations to put them, or lists of variables.
        passes: how many steps of Keras make one of the optimizer.
        average_passes: whether their gradients are averaged, not added.
        scale_local: whether gradients of local variables are divided by the size.
    """

    how: ReductionOptions
    groups: Groups
    passes: int
    average_passes: bool
    scale_local: bool


def check_options(
    name: str,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: int,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    num_groups: int,
    groups: Groups,
    process_set: ProcessSet,
    scale_local_gradients: bool,
) -> OptimizerOptions:
    """The options of an optimizer.

    Raises:
        ValueError: a bad argument; the text is Horovod's where Horovod has one.
    """
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op must be Average, Sum or Adasum, not {op!r}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not gradient_predivide_factor > 0.0:
        raise ValueError("gradient_predivide_factor must be > 0")
    if isinstance(backward_passes_per_step, bool) or not (
        isinstance(backward_passes_per_step, int) and backward_passes_per_step > 0
    ):
        raise ValueError("backward_passes_per_step must be > 0")
    if num_groups != 0:
        text = "Parameter `num_groups` has been replaced by `groups`."
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    listed = isinstance(groups, list | tuple)
    if listed and not all(isinstance(g, list | tuple) for g in groups):  # type: ignore[union-attr]
        listed = False
    counted = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    if groups is not None and not listed and not counted:
        raise ValueError(
            "groups should be a non-negative integer or a list of list of variables."
        )
    how = ReductionOptions(
        name=name,
        op=ReduceOp(op),
        compression=compression,
        predivide=float(gradient_predivide_factor),
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
    )
    passes, average = backward_passes_per_step, average_aggregated_gradients
    return OptimizerOptions(how, groups, passes, average, scale_local_gradients)


class GradientReducer:
    """The part of one optimizer that is distributed.

    Args:
        options: what its class was made with.
        key_of: the optimizer's own way to tell variables apart.

    Attributes:
        bypassed: Keras' own code runs, and calls us back: it is to find the plain
            optimizer.
        deferred: the variables whose gradients are reduced when Keras has accumulated
            them; None: it does not accumulate.
        counter, accumulators: variables of the optimizer, where it makes a step of
            several passes; None until it is built.
    """

    def __init__(self, options: OptimizerOptions, key_of: Callable[[Any], Any]) -> None:
        self.options = options
        self.bypassed = False
        self.deferred: list[Any] | None = None
        self.counter: Any = None
        self.accumulators: list[Any] = []
        self._key_of = key_of
        self._local: set[Any] = set()
        self._reduced: list[Any] = []

    def register_local_var(self, variable: Any) -> None:
        """The gradient of this variable does not travel."""
        self._local.add(self._key_of(variable))

    @contextlib.contextmanager
    def bypass(self) -> Iterator[None]:
        """Within it, the optimizer is as Keras made it."""
        before, self.bypassed = self.bypassed, True
        try:
            yield
        finally:
            self.bypassed = before

    def is_alone(self) -> bool:
        """Whether this rank has nobody to share gradients with."""
        chosen = self.options.how.process_set
        if not chosen.included():
            return True
        # Compiled steps outlive changes of the ranks.
        return chosen.size() == 1 and not runtime.elastic()

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients that an optimizer is to use; None stays None."""
        out = list(gradients)
        if self.is_alone():
            return out
        tensors, how = backend(), self.options.how
        present = [i for i, gradient in enumerate(out) if gradient is not None]
        local = [i for i in present if self._key_of(variables[i]) in self._local]
        if local and self.options.scale_local:
            factor = tensors.size(how.process_set)
            for i in local:
                out[i] = out[i] / keras.ops.cast(factor, out[i].dtype)
        sent = [i for i in present if i not in set(local)]
        if how.sparse_as_dense:
            for i in sent:
                out[i] = tensors.to_dense(out[i])
        if not sent:
            return out
        groups = self._groups(sent, variables)
        theirs = [variables[i] for i in sent]
        reduced = tensors.reduce([out[i] for i in sent], sent, theirs, groups, how)
        for i, gradient in zip(sent, reduced, strict=True):
            out[i] = gradient
        return out

    def reduce_for_apply(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """As `reduce`, for a program that calls `apply_gradients` with the result."""
        self._reduced = self.reduce(gradients, variables)
        return list(self._reduced)

    def take_reduced(self, gradients: Sequence[Any]) -> bool:
        """Whether these are what `reduce_for_apply` has returned; asked once."""
        known = {id(gradient) for gradient in self._reduced if gradient is not None}
        given = [gradient for gradient in gradients if gradient is not None]
        found = bool(known) and all(id(gradient) in known for gradient in given)
        self._reduced = []
        return found

    def all_true(self, flag: Any) -> Any:
        """Whether a flag is set on all ranks that share gradients."""
        if self.is_alone():
            return flag
        return backend().all_true(flag, self.options.how.process_set)

    def to_dense(self, gradients: Sequence[Any]) -> list[Any]:
        """Gradients to be added up over several passes.

        Raises:
            ValueError: one is sparse, and is not to become dense.
        """
        tensors = backend()
        for gradient in gradients:
            if gradient is None or not tensors.is_sparse(gradient):
                continue
            if not self.options.how.sparse_as_dense:
                raise ValueError(
                    "IndexedSlices are not supported when `backward_passes_per_step` > "
                    "1 and `sparse_as_dense` is False."
                )
        return [None if g is None else tensors.to_dense(g) for g in gradients]

    def _groups(self, sent: Sequence[int], variables: Sequence[Any]) -> list[list[int]]:
        """Indices into `sent` of what the program wants to travel together."""
        groups = self.options.groups
        if groups is None:
            return []
        if isinstance(groups, int):
            return [list(part) for part in split_list(range(len(sent)), groups)]
        place = {self._key_of(variables[i]): k for k, i in enumerate(sent)}
        wanted = [
            [place[key] for key in map(self._key_of, group) if key in place]
            for group in groups
        ]
        flat = [k for group in wanted for k in group]
        if len(set(flat)) < len(flat):
            raise ValueError("A variable can only appear once in groups.")
        return wanted
