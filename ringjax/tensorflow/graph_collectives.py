"""Adds collectives to graphs: a few nodes of kernels.py for each operation.

In the graph of a `tf.function` the graph reads from a token queue, so no thread waits
for the operation. A session of TensorFlow 1 cannot use ringjax's queues, so in its
graph an asynchronous kernel waits.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import replace

import tensorflow as tf

from ringjax.tensorflow import kernels, tf_private, token_queues
from ringjax.tensorflow.collective_spec import CollectiveSpec
from ringjax.world import timeouts

_anchors = itertools.count()


def normalize_name(name: str) -> str:
    """Replaces the characters that Horovod does not allow in names of operations."""
    return re.sub("[^a-zA-Z0-9_]", "_", name)


def _node_name(call: CollectiveSpec, inputs: Sequence[tf.Tensor]) -> str:
    if call.name:
        return kernels.valid_node_name(call.name)
    ends = dict.fromkeys(
        "captured" if isinstance(tensor, tf_private.EagerTensor) else str(tensor.name)
        for tensor in (*inputs[:1], *inputs[-1:])
    )
    return normalize_name("_".join([f"Horovod{call.op.capitalize()}", *ends]))


def run(
    call: CollectiveSpec, tensors: Sequence[tf.Tensor], splits: tf.Tensor | None = None
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Adds a collective to the current graph; the shapes of tensors may be unknown.

    If `call` has no name, a name is derived from its tensors. Ranks that build
    equal graphs derive equal names.

    Returns:
        The results, and for each result of alltoall and allgather an int32 tensor with
        the number of rows that came from each rank.
    """
    kernels.ensure_registered()
    call = replace(call, timeout=timeouts.current_limit(None))
    graph = tf.compat.v1.get_default_graph()
    dtypes = [tensor.dtype for tensor in tensors]
    if call.op in ("allgather", "alltoall"):
        dtypes += [tf.int32] * len(tensors)
    inputs = [*tensors, *([] if splits is None else [splits])]
    in_function = (
        graph.building_function and tf.compat.v1.executing_eagerly_outside_functions()
    )
    add = _add_to_function if in_function else _add_to_session
    with tf.device("CPU:0"):
        results = add(call, inputs, dtypes)
    outs, received = results[: len(tensors)], results[len(tensors) :]
    for out, tensor in zip(outs, tensors, strict=True):
        if call.op in ("allreduce", "broadcast"):
            out.set_shape(tensor.shape)
        elif tensor.shape.rank is not None:
            out.set_shape([None, *tensor.shape[1:]])
    for rows in received:
        rows.set_shape([None])
    return outs, received


def add_query(quantity: str, process_set_id: int, name: str | None) -> tf.Tensor:
    """Adds a node that calls `rank_queries.query` when the graph runs."""
    kernels.ensure_registered()
    text = CollectiveSpec(quantity, process_set_id=process_set_id).to_json()
    with tf.device("CPU:0"):
        (value,) = tf_private.add_node("RingjaxNumber", name, call=text).outputs
    value.set_shape([])
    return value


def _add_to_function(
    call: CollectiveSpec, inputs: list[tf.Tensor], dtypes: list[tf.DType]
) -> list[tf.Tensor]:
    with tf.init_scope():
        token_queues.preallocate()
    start = tf_private.add_node(
        "RingjaxStart",
        _node_name(call, inputs),
        tensors=inputs,
        anchors=[_add_anchor()],
        M=1,
        call=call.to_json(),
    )
    number, queue = start.outputs
    token = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64])
    finish = tf_private.add_node(
        "RingjaxFinish",
        "RingjaxFinish",
        number=number,
        token=token,
        signals=[queue],
        T=dtypes,
        call=call.to_json(),
    )
    return list(finish.outputs)


def _add_anchor() -> tf.Tensor:
    """Adds a resource that no other node uses; kernels.py gives the reason."""
    name = f"ringjax/anchor/{os.getpid()}/{next(_anchors)}"
    graph = tf.compat.v1.get_default_graph()
    while graph.building_function:
        if graph.is_control_flow_graph:
            # The derivative of a loop cannot use resources from outside of the loop.
            return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=name)
        graph = graph.outer_graph
    with tf.init_scope():
        return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=name)


def _add_to_session(
    call: CollectiveSpec, inputs: list[tf.Tensor], dtypes: list[tf.DType]
) -> list[tf.Tensor]:
    start = tf_private.add_node(
        "RingjaxStart",
        _node_name(call, inputs),
        tensors=inputs,
        anchors=[],
        M=0,
        call=replace(call, waits=True).to_json(),
    )
    wait = tf_private.add_node(
        "RingjaxWait",
        "RingjaxWait",
        number=start.outputs[0],
        T=dtypes,
        call=call.to_json(),
    )
    return list(wait.outputs)
