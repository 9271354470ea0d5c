"""Collectives in graphs: the nodes of kernels.py, a few for each operation.

In the graph of a `tf.function` nobody waits but a queue. In other graphs, those of
TensorFlow 1, whose sessions do not share queues with us, an asynchronous kernel does.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from ringjax.tensorflow import kernels, nodes
from ringjax.tensorflow.calls import Call
from ringjax.world import timeouts

_anchors = itertools.count()


def normalized(name: str) -> str:
    """A name with the characters that nodes of a graph may have."""
    return re.sub("[^a-zA-Z0-9_]", "_", name)


def _node_name(call: Call, inputs: Sequence[Any]) -> str:
    if call.name:
        return kernels.node_name(call.name)
    ends = dict.fromkeys(
        "captured" if isinstance(tensor, nodes.EagerTensor) else str(tensor.name)
        for tensor in (*inputs[:1], *inputs[-1:])
    )
    return normalized("_".join([f"Horovod{call.op.capitalize()}", *ends]))


def run(
    call: Call, tensors: Sequence[Any], splits: Any = None
) -> tuple[list[Any], list[Any]]:
    """Adds an operation to the graph of the moment.

    Args:
        call: without a name it gets one after its tensors; ranks that build the same
            graph find the same.
        tensors: of any shapes, known or not.
        splits: for alltoall, a tensor.

    Returns:
        Its results, and for those of alltoall and allgather, as int32, how many of
        their rows came from each rank.
    """
    kernels.ensure_registered()
    call = replace(call, timeout=timeouts.now(None))
    graph = tf.compat.v1.get_default_graph()
    dtypes = [tensor.dtype for tensor in tensors]
    if call.op in ("allgather", "alltoall"):
        dtypes += [tf.int32] * len(tensors)
    inputs = [*tensors, *([] if splits is None else [splits])]
    with tf.device("CPU:0"):
        if (
            graph.building_function
            and tf.compat.v1.executing_eagerly_outside_functions()
        ):
            results = _in_function(call, inputs, dtypes)
        else:
            results = _in_session(call, inputs, dtypes)
    outs, received = results[: len(tensors)], results[len(tensors) :]
    for out, tensor in zip(outs, tensors, strict=True):
        if call.op in ("allreduce", "broadcast"):
            out.set_shape(tensor.shape)
        elif tensor.shape.rank is not None:
            out.set_shape([None, *tensor.shape[1:]])
    for rows in received:
        rows.set_shape([None])
    return outs, received


def number(what: str, process_set_id: int, name: str | None) -> Any:
    """Adds a node that reads one of `world.number` when the graph runs."""
    kernels.ensure_registered()
    text = Call(what, process_set_id=process_set_id).text()
    with tf.device("CPU:0"):
        (value,) = nodes.add("RingjaxNumber", name, call=text).outputs
    value.set_shape([])
    return value


def _in_function(call: Call, inputs: list[Any], dtypes: list[Any]) -> list[Any]:
    with tf.init_scope():
        kernels.prepare_signal()
    anchor = _anchor()
    start = nodes.add(
        *("RingjaxStart", _node_name(call, inputs)),
        tensors=inputs,
        anchors=[anchor],
        M=1,
        call=call.text(),
    )
    ticket, signal = start.outputs
    token = tf.raw_ops.QueueDequeueV2(handle=signal, component_types=[tf.int64])
    finish = nodes.add(
        *("RingjaxFinish", "RingjaxFinish"),
        number=ticket,
        token=token,
        signals=[signal],
        T=dtypes,
        call=call.text(),
    )
    return list(finish.outputs)


def _anchor() -> Any:
    """A resource that nobody else uses: see kernels.py."""
    name = f"ringjax/anchor/{os.getpid()}/{next(_anchors)}"
    graph: Any = tf.compat.v1.get_default_graph()
    while graph.building_function:
        if graph.is_control_flow_graph:
            # Derivatives of loops do not take resources from outside.
            return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=name)
        graph = graph.outer_graph
    with tf.init_scope():
        return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=name)


def _in_session(call: Call, inputs: list[Any], dtypes: list[Any]) -> list[Any]:
    start = nodes.add(
        *("RingjaxStart", _node_name(call, inputs)),
        tensors=inputs,
        anchors=[],
        M=0,
        call=replace(call, waits=True).text(),
    )
    wait = nodes.add(
        *("RingjaxWait", "RingjaxWait"),
        number=start.outputs[0],
        T=dtypes,
        call=call.text(),
    )
    return list(wait.outputs)
