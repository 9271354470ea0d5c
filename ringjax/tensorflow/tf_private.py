"""Access to TensorFlow's private Python modules; no other file of ringjax uses them.

The private functions run operations that are registered at run time, eagerly or as
nodes of a graph. TensorFlow's own generated Python code uses these functions, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, record
from tensorflow.python.framework import op_def_library, ops
from tensorflow.python.ops import control_flow_util

EagerTensor: Any = ops.EagerTensor
"""The class of tensors with values; other tensors are outputs of nodes in a graph."""

may_record = record.could_possibly_record
"""Returns whether a gradient tape might be recording."""

record_operation = record.record_operation
"""Records an operation in the tapes: its name, results, arguments and derivative."""

executing_eagerly = context.executing_eagerly
"""Returns whether operations run immediately."""


def execute_eagerly(
    op: str, inputs: Sequence[tf.Tensor], **attributes: object
) -> list[tf.Tensor]:
    """Runs an operation in eager mode; raises an exception if the operation fails."""
    words = [word for pair in attributes.items() for word in pair]
    current = context.context()
    current.ensure_initialized()
    with tf.init_scope():
        outs: list[tf.Tensor] = pywrap_tfe.TFE_Py_FastPathExecute(
            current, op, None, *inputs, *words
        )
    return outs


def add_node(op: str, name: str | None, **arguments: object) -> tf.Operation:
    """Adds a node to the current graph.

    TensorFlow may change the `name`. `arguments` are the node's inputs and attributes.
    """
    _, _, node, _ = op_def_library._apply_op_helper(op, name=name, **arguments)
    return node


def add_xla_call_module(
    tensors: Sequence[tf.Tensor],
    version: int,
    module: str,
    shapes: Sequence[list[int]],
    dtypes: Sequence[tf.DType],
) -> list[tf.Tensor]:
    """Adds a node that runs a module of StableHLO on CPUs; returns its results."""
    # Import this module late, because few programs need it.
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    return list(
        gen_xla_ops.xla_call_module(
            list(tensors), version, module, shapes, dtypes, platforms=["CPU"]
        )
    )


def wrap_array(array: np.ndarray[Any, Any], device: str, dtype: int) -> tf.Tensor:
    """Makes a tensor of an array, in the same memory if TensorFlow can use it."""
    context.context().ensure_initialized()
    return EagerTensor(array, device, dtype)


def is_compiled(graph: tf.Graph) -> bool:
    """Returns whether XLA compiles a graph or an outer function of the graph."""
    found: bool = control_flow_util.GraphOrParentsInXlaContext(graph)
    return found


def is_jit_function(graph: tf.Graph) -> bool:
    """Returns whether a graph belongs to the function that has `jit_compile=True`."""
    found: bool = control_flow_util.InXlaContext(graph.outer_graph)
    return found
