"""Runs collectives on tensors, eagerly or in a graph, and their derivatives.

The public functions are in reductions.py and movement.py. The derivative of a
collective is another collective, so the derivatives are in this file, too. In eager
mode a derivative is recorded directly in the tape, because `tf.custom_gradient` takes
as much time as the collective itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypedDict

import tensorflow as tf

from ringjax.eager import lane
from ringjax.ops import Average, Sum
from ringjax.tensorflow import (
    eager_collectives,
    graph_collectives,
    rank_queries,
    tf_private,
    xla_collectives,
)
from ringjax.tensorflow.collective_spec import CollectiveSpec, process_set_id_of
from ringjax.tensorflow.compression import Compressor
from ringjax.tensorflow.failures import to_tensorflow_error
from ringjax.tensorflow.tf_types import Gradient, Splits, TensorLike
from ringjax.world.process_set import ProcessSet

Tensors: TypeAlias = Sequence[tf.Tensor]
RowCounts: TypeAlias = Sequence[list[int] | tf.Tensor]
"""For each result of allgather or alltoall, the number of rows from each rank.

The numbers are a list, or in a graph a tensor.
"""

Rule: TypeAlias = Callable[[Tensors, RowCounts], Tensors]
"""Computes gradients of the arguments from gradients of the results."""


class OperationOptions(TypedDict):
    """The attributes of a `CollectiveSpec` that say how to reduce."""

    reduce_op: int
    prescale: float
    postscale: float


def make_spec(
    op: str,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool = False,
    **options: Any,
) -> CollectiveSpec:
    """Makes the specification of a collective from a user's arguments.

    The options are further attributes of `CollectiveSpec`. A wrong `name` or
    `process_set` causes a TypeError or ValueError.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"ringjax.{op}: name must be a str, got {name!r}")
    try:
        number = process_set_id_of(process_set, op)
    except ValueError as error:
        raise as_argument_error(error) from None
    return CollectiveSpec(
        op, name or "", process_set_id=number, bare=ignore_name_scope, **options
    )


def as_argument_error(error: Exception) -> Exception:
    """Returns the exception to raise for a bad argument.

    While a function is traced the exception stays as it is. AutoGraph rebuilds every
    exception that leaves a function, and can rebuild only Python's own classes.
    """
    return to_tensorflow_error(error) if tf_private.executing_eagerly() else error


def reduction_options(
    op: str,
    average: bool | None,
    reduce_op: int | None,
    prescale: float,
    postscale: float,
) -> OperationOptions:
    """Makes the options of a reduction from a user's arguments."""
    reduce_op = lane.op_or_average(average, reduce_op, stacklevel=3)
    return {
        "reduce_op": lane.reduce_op(op, reduce_op),
        "prescale": lane.as_float(op, "prescale_factor", prescale),
        "postscale": lane.as_float(op, "postscale_factor", postscale),
    }


def run(
    call: CollectiveSpec,
    tensors: Sequence[TensorLike],
    rule: Rule,
    splits: Splits = None,
) -> tuple[list[tf.Tensor], RowCounts]:
    """Runs a collective eagerly, or adds it to the current graph.

    `rule` computes the derivative. `splits` are the rows for each rank, for alltoall.
    """
    tensors = [
        tensor
        if isinstance(tensor, tf_private.EagerTensor)
        else tf.convert_to_tensor(tensor)
        for tensor in tensors
    ]
    if not tf_private.executing_eagerly():
        return _add_to_graph(call, tensors, rule, splits)
    rows = [] if splits is None else _splits_as_list(call, splits)
    outs, received = eager_collectives.run(call, tensors, rows)
    if tf_private.may_record():

        def derivative(*gradients: Gradient) -> Tensors:
            return rule(_dense_gradients(gradients, outs), received)

        name = f"Ringjax_{call.op}"
        tf_private.record_operation(name, outs, list(tensors), derivative)
    return outs, received


def _add_to_graph(
    call: CollectiveSpec, tensors: Tensors, rule: Rule, splits: Splits
) -> tuple[list[tf.Tensor], RowCounts]:
    add: Callable[..., tuple[list[tf.Tensor], RowCounts]] = graph_collectives.run
    if _in_xla_function():
        add = xla_collectives.run
    elif call.op == "alltoall":
        splits = _splits_as_tensor(splits)
    if not tensors:
        return add(call, tensors, splits)

    counts: list[list[int] | tf.Tensor] = []

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def collective(*inputs: tf.Tensor) -> tuple[tuple[tf.Tensor, ...], object]:
        outs, received = add(call, inputs, splits)

        def derivative(*gradients: Gradient) -> Tensors:
            return rule(_dense_gradients(gradients, outs), received)

        counts.extend(received)
        return tuple(outs), derivative

    return list(collective(*tensors)), counts


def _dense_gradients(gradients: Sequence[Gradient], outs: Tensors) -> Tensors:
    return [
        tf.zeros_like(out) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, out in zip(gradients, outs, strict=True)
    ]


def _splits_as_list(call: CollectiveSpec, splits: Splits) -> list[int]:
    given = splits.numpy() if isinstance(splits, tf_private.EagerTensor) else splits
    try:
        return lane.parse_splits(call.op, call.name, given)
    except ValueError as error:
        raise to_tensorflow_error(error) from None


def _splits_as_tensor(splits: Splits) -> tf.Tensor:
    if splits is None:
        return tf.constant([], tf.int32)
    given = tf.convert_to_tensor(splits)
    return given if given.dtype in (tf.int32, tf.int64) else tf.cast(given, tf.int64)


# -- parts that several operations share -----------------------------------------------


def run_compressed(
    run: Callable[[CollectiveSpec, Tensors], Tensors],
    call: CollectiveSpec,
    tensors: Sequence[TensorLike],
    compression: type[Compressor],
) -> list[tf.Tensor]:
    """Compresses tensors, runs a collective on them, and decompresses the results."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    outs = run(call, [tensor for tensor, _ in pairs])
    return [
        compression.decompress(out, context)
        for out, (_, context) in zip(outs, pairs, strict=True)
    ]


# A derivative keeps the process set itself, not its id, because `CollectiveSpec` would
# find the process set that was used last under this id. That process set may have
# another time limit.


def average_gradients(
    gradients: Tensors, process_set: ProcessSet, ignore_name_scope: bool
) -> Tensors:
    """Averages gradients over the ranks of a process set."""
    call = make_spec(
        "allreduce", None, process_set, ignore_name_scope, reduce_op=Average
    )
    return run_allreduce(call, gradients)


def run_allreduce(call: CollectiveSpec, tensors: Sequence[TensorLike]) -> Tensors:
    """Runs a differentiable allreduce of `tensors` as one operation."""
    process_set = call.process_set()

    def rule(gradients: Tensors, _: RowCounts) -> Tensors:
        options = OperationOptions(
            reduce_op=call.reduce_op, prescale=call.prescale, postscale=call.postscale
        )
        unnamed = make_spec("allreduce", None, process_set, call.bare, **options)
        return run_allreduce(unnamed, gradients)

    return run(call, tensors, rule)[0]


def run_reducescatter(call: CollectiveSpec, tensors: Sequence[TensorLike]) -> Tensors:
    """Runs a differentiable reducescatter of `tensors` as one operation."""
    process_set = call.process_set()

    def rule(gradients: Tensors, _: RowCounts) -> Tensors:
        factor = call.prescale * call.postscale
        if call.reduce_op == Sum:
            factor *= process_set.size()
        scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        unnamed = make_spec("allgather", None, process_set, call.bare)
        return run_allgather(unnamed, scaled)

    return run(call, tensors, rule)[0]


def run_allgather(call: CollectiveSpec, tensors: Sequence[TensorLike]) -> Tensors:
    """Runs a differentiable allgather of `tensors` as one operation."""
    process_set = call.process_set()

    def rule(gradients: Tensors, received: RowCounts) -> Tensors:
        means = average_gradients(gradients, process_set, call.bare)
        rank = _own_set_rank(process_set)
        parts = []
        for mean, rows in zip(means, received, strict=True):
            rows = tf.convert_to_tensor(rows, tf.int32)
            start = tf.reduce_sum(rows[:rank])
            parts.append(mean[start : start + rows[rank]])
        return parts

    return run(call, tensors, rule)[0]


def _in_xla_function() -> bool:
    """Returns whether XLA compiles the current graph, so that ranks are constants."""
    return tf_private.is_compiled(tf.compat.v1.get_default_graph())


def _own_set_rank(process_set: ProcessSet) -> int | tf.Tensor:
    if tf_private.executing_eagerly() or _in_xla_function():
        return process_set.rank()
    number = process_set_id_of(process_set, "rank")
    return graph_collectives.add_query("set_rank", number, None)


def read_rank_info(
    quantity: str, process_set_id: int = 0, name: str | None = None
) -> tf.Tensor:
    """Returns rank, size or another result of `rank_queries.query` as int32.

    A graph has a node `name` that reads the number whenever the graph runs.
    """
    if not (tf_private.executing_eagerly() or _in_xla_function()):
        return graph_collectives.add_query(quantity, process_set_id, name)
    try:
        return tf.constant(rank_queries.query(quantity, process_set_id), tf.int32)
    except (RuntimeError, ValueError) as error:
        raise to_tensorflow_error(error) from None
