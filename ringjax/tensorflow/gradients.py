"""Reduces the gradients of a step over all ranks, eagerly and in graphs.

`DistributedGradientTape` and all `DistributedOptimizer`s use this module. It divides
the gradients into buckets and reduces each bucket in one operation. It does not reduce
the gradients of local variables.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from ringjax import runtime
from ringjax.horovod import gradient_options
from ringjax.ops import Adasum, Average
from ringjax.tensorflow import parameter_check
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.collective_spec import process_set_id_of
from ringjax.tensorflow.compression import Compression, Compressor
from ringjax.tensorflow.gradient_names import gradient_namer
from ringjax.tensorflow.movement import process_set_included_op, size_op
from ringjax.tensorflow.reductions import grouped_allreduce
from ringjax.tensorflow.tf_types import Gradient, Groups, Variable
from ringjax.tensorflow.variables import shape_and_dtype, variable_key
from ringjax.world.process_set import ProcessSet, global_process_set
from ringjax.xla import buckets


@dataclass(frozen=True, eq=False)
class GradientSettings:
    """The effective arguments of `DistributedGradientTape`, and a name prefix.

    The name is the prefix of the names of operations, and is the same on all ranks. If
    `groups` is None, all gradients travel in buckets that are limited by bytes.
    """

    name: str
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: Groups = None
    num_groups: int = 0
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        gradient_options.check_reduction(self.op, self.gradient_predivide_factor)
        groups = gradient_options.check_groups(
            self.groups, self.num_groups, "tf.Variable", stacklevel=4
        )
        object.__setattr__(self, "groups", groups)


class GradientBucketReducer:
    """Reduces gradients as its settings describe, except those of local variables.

    Example:
        >>> import ringjax.tensorflow as hvd, tensorflow as tf
        >>> hvd.init()
        >>> reducer = GradientBucketReducer(GradientSettings("example"))
        >>> variables = [tf.Variable([1.0]), tf.Variable([2.0])]
        >>> gradients = [tf.constant([3.0]), None]
        >>> reducer(gradients, variables)[0].shape, reducer.settings.name
        (TensorShape([1]), 'example')
    """

    def __init__(self, settings: GradientSettings) -> None:
        self.settings = settings
        self._local: set[Hashable] = set()

    def register_local(self, variable: Variable) -> None:
        """Makes a variable local: later gradients of the variable are not reduced."""
        self._local.add(variable_key(variable))

    def is_local(self, variable: Variable) -> bool:
        """Returns whether a variable was registered as local."""
        return bool(self._local) and variable_key(variable) in self._local

    @do_not_convert
    def __call__(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable] | None = None,
        use_generic_names: bool = True,
    ) -> list[Gradient]:
        """Reduces gradients; `scale_local_gradients` divides local gradients by size.

        On a rank outside of the process set all gradients stay as they are.

        Args:
            gradients: tensors, `tf.IndexedSlices` and None. A gradient that is None
                must be None on all ranks, and stays None.
            variables: the variables of the gradients; needed for local variables and
                for groups of variables.
            use_generic_names: an argument of Horovod without effect; names never
                depend on the variables.
        """
        gradients = list(gradients)
        if variables is None and (
            self._local or isinstance(self.settings.groups, list | tuple)
        ):
            raise ValueError("variables are needed where some are local or in groups")
        if variables is not None and len(variables) != len(gradients):
            raise ValueError(
                f"{len(gradients)} gradients of {len(variables)} variables"
            )
        local = [i for i, v in enumerate(variables or ()) if self.is_local(v)]
        shared = sorted(set(range(len(gradients))) - set(local))
        own = None if variables is None else [variables[i] for i in shared]
        chosen = [gradients[i] for i in shared]
        groups = group_indices(self.settings.groups, chosen, own)
        reduced = reduce_gradients(chosen, groups, self.settings, own)
        for i, gradient in zip(shared, reduced, strict=True):
            gradients[i] = gradient
        if local and self.settings.scale_local_gradients:
            size = size_op(process_set_id_of(self.settings.process_set, "size"))
            for i in local:
                gradients[i] = divide_gradient(gradients[i], size)
        return gradients


def _make_allreduce_grads_fn(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: type[Compressor],
    sparse_as_dense: bool,
    op: int,
    gradient_predivide_factor: float = 1.0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
) -> GradientBucketReducer:
    """Makes a reducer for programs with their own tapes; the name is Horovod's."""
    del device_dense, device_sparse
    settings = GradientSettings(
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        process_set=process_set,
    )
    return GradientBucketReducer(settings)


@do_not_convert
def reduce_gradients(
    gradients: Sequence[Gradient],
    groups: Sequence[Sequence[int]],
    settings: GradientSettings,
    variables: Sequence[Variable] | None = None,
) -> list[Gradient]:
    """Reduces all gradients; a gradient that is None stays None.

    Each of the `groups`, which are indices of gradients, travels in one operation. All
    other gradients share buckets that are limited by bytes. `settings.groups` is not
    read. In some steps the `variables` are compared between the ranks, and a warning
    names a difference.
    """
    found: list[Gradient] = list(gradients)
    if settings.sparse_as_dense:
        found = [
            tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g
            for g in found
        ]
    if settings.op == Adasum and any(isinstance(g, tf.IndexedSlices) for g in found):
        raise NotImplementedError(
            "Adasum does not reduce tf.IndexedSlices; pass sparse_as_dense=True"
        )
    present = [i for i, gradient in enumerate(found) if gradient is not None]
    process_set, config = settings.process_set, runtime.config()
    if not present or (not config.elastic and _has_no_peers(process_set)):
        return found

    def reduce() -> list[Gradient]:
        own = [variables[i] for i in present] if variables else []
        checks = parameter_check.check(
            settings.name, own, process_set, config.check_parameters
        )
        with tf.control_dependencies(checks):
            units = plan_buckets(found, groups, config.bucket_bytes)
            reduced = _reduce_buckets(found, units, settings)
        return [reduced[i] for i in present]

    def keep() -> list[Gradient]:
        return [_copy(found[i]) for i in present]

    if process_set is global_process_set or not config.elastic:
        results = reduce()
    else:
        # The graph of an elastic job outlives changes of the members, so each run of
        # the graph must find out whether this rank is in the process set.
        included = process_set_included_op(process_set_id_of(process_set, "allreduce"))
        results = tf.cond(tf.equal(included, 1), reduce, keep)
        results = list(results) if isinstance(results, list | tuple) else [results]
    for i, gradient in zip(present, results, strict=True):
        found[i] = gradient
    return found


def _has_no_peers(process_set: ProcessSet) -> bool:
    return not process_set.included() or process_set.size() == 1


def _reduce_buckets(
    gradients: Sequence[Gradient],
    units: Sequence[Sequence[int]],
    settings: GradientSettings,
) -> dict[int, Gradient]:
    """Returns the reduced gradients by their indices."""
    factor = settings.gradient_predivide_factor
    # The core divides by the size after the sum.
    before, after = (1.0 / factor, factor) if settings.op == Average else (1.0, 1.0)
    name = gradient_namer(settings.name)
    reduced: dict[int, Gradient] = {}
    with tf.name_scope(f"{settings.name}_Allreduce"):
        for unit in units:
            results = grouped_allreduce(
                [gradients[i] for i in unit],
                compression=settings.compression,
                op=settings.op,
                prescale_factor=before,
                postscale_factor=after,
                process_set=settings.process_set,
                ignore_name_scope=True,
                name=name(),
            )
            reduced |= zip(unit, results, strict=True)
    return reduced


def plan_buckets(
    gradients: Sequence[Gradient], groups: Sequence[Sequence[int]], bucket_bytes: int
) -> list[list[int]]:
    """Plans which gradients are reduced in one operation.

    Each list of the result has the indices of gradients of one dtype, which are all
    dense or all sparse. Gradients that are None are in no list. The program wants each
    of the `groups` in one operation, and `bucket_bytes` limits all other buckets.

    Example:
        >>> import tensorflow as tf
        >>> three = [tf.zeros(3), tf.zeros(4), tf.zeros(3, tf.int32)]
        >>> plan_buckets(three, [[0, 1, 2]], 1 << 20)
        [[0, 1], [2]]
    """
    found = [unit for group in groups for unit in _split_by_kind(gradients, group)]
    grouped = {i for unit in found for i in unit}
    free = [i for i in range(len(gradients)) if i not in grouped]
    sparse = [i for i in free if isinstance(gradients[i], tf.IndexedSlices)]
    dense = [i for i in free if tf.is_tensor(gradients[i]) and i not in set(sparse)]
    avals = [shape_and_dtype(gradients[i]) for i in dense]
    cuts = buckets.plan(avals, bucket_bytes) if avals else ()
    found += [[dense[i] for i in cut] for cut in cuts]
    return found + _split_by_kind(gradients, sparse)


def _split_by_kind(
    gradients: Sequence[Gradient], indices: Iterable[int]
) -> list[list[int]]:
    """Splits indices so that no part mixes dtypes, or dense and sparse gradients."""
    kinds: dict[tuple[bool, tf.DType], list[int]] = {}
    for i in indices:
        gradient = gradients[i]
        if gradient is not None:
            kind = (isinstance(gradient, tf.IndexedSlices), gradient.dtype)
            kinds.setdefault(kind, []).append(i)
    return list(kinds.values())


def group_indices(
    groups: Groups, gradients: Sequence[Gradient], variables: Sequence[Variable] | None
) -> list[list[int]]:
    """Returns Horovod's argument `groups` as indices of gradients."""
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    index_of = {variable_key(variable): i for i, variable in enumerate(variables or ())}
    return gradient_options.group_indices(groups, present, index_of, variable_key)


def divide_gradient(gradient: Gradient, divisor: int | tf.Tensor) -> Gradient:
    """Divides a dense or sparse gradient by a number; None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(divisor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(divisor, gradient.dtype)


def _copy(gradient: Gradient) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        parts = (gradient.values, gradient.indices, gradient.dense_shape)
        values, indices, shape = (None if p is None else tf.identity(p) for p in parts)
        return tf.IndexedSlices(values, indices, shape)
    return tf.identity(gradient)
