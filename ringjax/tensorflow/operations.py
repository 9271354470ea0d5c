"""How operations on tensors run, in either mode, and are differentiated.

The public functions, which say what is reduced or moved, are in reductions.py and
movement.py. Derivatives are operations again, so the rules that several of them share
are here. Outside of graphs a rule is told to the tape directly: TensorFlow's decorator
takes as long as the whole operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from ringjax.eager import lane
from ringjax.ops import Sum
from ringjax.tensorflow import (
    eager_collectives,
    graph_collectives,
    rank_queries,
    tf_private,
    xla_collectives,
)
from ringjax.tensorflow.collective_spec import CollectiveSpec, process_set_id_of
from ringjax.tensorflow.failures import to_tensorflow_error
from ringjax.world.process_set import ProcessSet

Tensors = Sequence[Any]
# From the gradients of the results, and the rows that came from each rank, to the
# gradients of the arguments.
Rule = Callable[[Tensors, Tensors], Tensors]


def make_spec(
    op: str, name: str | None, process_set: ProcessSet, **more: Any
) -> CollectiveSpec:
    """What an operation says of itself.

    Raises:
        TypeError, ValueError: `name` or `process_set` is wrong.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"ringjax.{op}: name must be a str, got {name!r}")
    try:
        number = process_set_id_of(process_set, op)
    except ValueError as error:
        raise as_argument_error(error) from None
    return CollectiveSpec(op=op, name=name or "", process_set_id=number, **more)


def as_argument_error(error: Exception) -> Exception:
    """What to raise for a bad argument.

    While a function is traced the exception stays as it is: AutoGraph makes another one
    of every exception that comes out, and knows Python's own only.
    """
    return to_tensorflow_error(error) if tf_private.executing_eagerly() else error


def reduction_options(
    op: str, average: bool | None, reduce_op: int | None, prescale: Any, postscale: Any
) -> dict[str, Any]:
    """What a reduction says of itself besides.

    Raises:
        TypeError, ValueError: there is no such reduction, or both ways to name one.
    """
    reduce_op = lane.op_or_average(average, reduce_op, stacklevel=3)
    return {
        "reduce_op": lane.reduce_op(op, reduce_op),
        "prescale": lane.as_float(op, "prescale_factor", prescale),
        "postscale": lane.as_float(op, "postscale_factor", postscale),
    }


def run(
    call: CollectiveSpec,
    tensors: Tensors,
    rule: Rule,
    splits: Any = None,
    ignore_name_scope: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Runs an operation, or adds it to a graph; differentiable.

    Args:
        rule: for its derivative.
        splits: of alltoall.
        ignore_name_scope: in a graph, leave the name as it is.

    Returns:
        The results; for each of allgather and alltoall the rows that came from each
        rank: lists, or in a graph tensors.
    """
    tensors = [
        tensor
        if isinstance(tensor, tf_private.EagerTensor)
        else tf.convert_to_tensor(tensor)
        for tensor in tensors
    ]
    if tf_private.executing_eagerly():
        rows = [] if splits is None else _splits_as_list(call, splits)
        outs, received = eager_collectives.run(call, tensors, rows)
        if tf_private.may_record():

            def back(*gradients: Any) -> Tensors:
                return rule(_dense_gradients(gradients, outs), received)

            tf_private.record_operation(f"Ringjax_{call.op}", outs, list(tensors), back)
        return outs, received
    return _add_to_graph(call, tensors, rule, splits, ignore_name_scope)


def _add_to_graph(
    call: CollectiveSpec,
    tensors: Tensors,
    rule: Rule,
    splits: Any,
    ignore_name_scope: bool,
) -> tuple[list[Any], list[Any]]:
    call = replace(call, bare=ignore_name_scope)
    add = graph_collectives.run
    if _in_xla_function():
        add = xla_collectives.run
    elif call.op == "alltoall":
        splits = _splits_as_tensor(splits)
    if not tensors:
        return add(call, tensors, splits)

    counts: list[Any] = []

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def collective(*inputs: Any) -> Any:
        outs, received = add(call, inputs, splits)

        def back(*gradients: Any) -> Tensors:
            return rule(_dense_gradients(gradients, outs), received)

        counts.extend(received)
        return tuple(outs), back

    return list(collective(*tensors)), counts


def _dense_gradients(gradients: Tensors, outs: Tensors) -> list[Any]:
    """Gradients as dense tensors, also those that TensorFlow leaves out."""
    return [
        tf.zeros_like(out) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, out in zip(gradients, outs, strict=True)
    ]


def _splits_as_list(call: CollectiveSpec, splits: Any) -> list[int]:
    given = splits.numpy() if isinstance(splits, tf_private.EagerTensor) else splits
    try:
        return lane.parse_splits(call.op, call.name, given)
    except ValueError as error:
        raise to_tensorflow_error(error) from None


def _splits_as_tensor(splits: Any) -> Any:
    if splits is None:
        return tf.constant([], tf.int32)
    given = tf.convert_to_tensor(splits)
    return given if given.dtype in (tf.int32, tf.int64) else tf.cast(given, tf.int64)


# -- what several operations share -----------------------------------------------------


def run_compressed(
    tensors: Tensors, compression: Any, go: Callable[[Tensors], Tensors]
) -> list[Any]:
    """Compresses, runs, decompresses."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    outs = go([tensor for tensor, _ in pairs])
    return [
        compression.decompress(out, context)
        for out, (_, context) in zip(outs, pairs, strict=True)
    ]


def run_allreduce(
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    how: dict[str, Any],
) -> list[Any]:
    """A differentiable allreduce of `tensors` as one operation."""

    def rule(gradients: Tensors, _: Tensors) -> Tensors:
        return run_allreduce(gradients, None, process_set, ignore_name_scope, how)

    call = make_spec("allreduce", name, process_set, **how)
    return run(call, tensors, rule, ignore_name_scope=ignore_name_scope)[0]


def run_reducescatter(
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    how: dict[str, Any],
) -> list[Any]:
    """A differentiable reducescatter of `tensors` as one operation."""

    def rule(gradients: Tensors, _: Tensors) -> Tensors:
        factor = how["prescale"] * how["postscale"]
        if how["reduce_op"] == Sum:
            factor *= process_set.size()
        scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        return run_allgather(scaled, None, process_set, ignore_name_scope)

    call = make_spec("reducescatter", name, process_set, **how)
    return run(call, tensors, rule, ignore_name_scope=ignore_name_scope)[0]


def run_allgather(
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
) -> list[Any]:
    """A differentiable allgather of `tensors` as one operation."""

    def rule(gradients: Tensors, received: Tensors) -> Tensors:
        how = reduction_options("allreduce", None, None, 1.0, 1.0)
        means = run_allreduce(gradients, None, process_set, ignore_name_scope, how)
        me = own_set_rank(process_set)
        parts = []
        for mean, rows in zip(means, received, strict=True):
            rows = tf.convert_to_tensor(rows, tf.int32)
            start = tf.reduce_sum(rows[:me])
            parts.append(mean[start : start + rows[me]])
        return parts

    call = make_spec("allgather", name, process_set)
    return run(call, tensors, rule, ignore_name_scope=ignore_name_scope)[0]


def _in_xla_function() -> bool:
    """Whether XLA compiles the graph of the moment: then numbers are constants."""
    return tf_private.is_compiled(tf.compat.v1.get_default_graph())


def own_set_rank(process_set: ProcessSet) -> Any:
    """This rank's rank in the set, when the program or graph runs."""
    if tf_private.executing_eagerly() or _in_xla_function():
        return process_set.rank()
    return graph_collectives.add_query(
        "set_rank", process_set_id_of(process_set, "rank"), None
    )


def read_rank_info(what: str, process_set_id: int = 0, name: str | None = None) -> Any:
    """Reads a number of `rank_queries` as an int32 tensor, in a graph when it runs."""
    if not (tf_private.executing_eagerly() or _in_xla_function()):
        return graph_collectives.add_query(what, process_set_id, name)
    try:
        return tf.constant(rank_queries.query(what, process_set_id), tf.int32)
    except (RuntimeError, ValueError) as error:
        raise to_tensorflow_error(error) from None
