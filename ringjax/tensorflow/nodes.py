"""Operations that are registered at run time: in graphs, and run at once.

The only module that names TensorFlow's unpublished Python, which its generated wrappers
of operations use as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, record
from tensorflow.python.framework import op_def_library, ops
from tensorflow.python.ops import control_flow_util

EagerTensor: Any = ops.EagerTensor
"""What a tensor with a value is; other tensors are places in a graph."""

may_record = record.could_possibly_record
"""Whether a tape might be watching."""

record_operation = record.record_operation
"""Tells the tapes: name, results, arguments, and from gradients to gradients."""

executing_eagerly = context.executing_eagerly
"""Whether operations run at once."""


def run_now(op: str, inputs: Sequence[Any], **attributes: Any) -> Any:
    """Runs an operation; raises what it has failed with."""
    words = [word for pair in attributes.items() for word in pair]
    current = context.context()
    current.ensure_initialized()
    with tf.init_scope():
        return pywrap_tfe.TFE_Py_FastPathExecute(current, op, None, *inputs, *words)


def add(op: str, name: str | None, **arguments: Any) -> Any:
    """Adds a node to the graph of the moment, with its inputs and attributes by name.

    Returns:
        The new node; its outputs are its `outputs`.
    """
    _, _, node, _ = op_def_library._apply_op_helper(op, name=name, **arguments)
    return node


def call_module(
    tensors: Sequence[Any], version: int, module: str, shapes: Any, dtypes: Any
) -> Any:
    """Adds a node that is a function of StableHLO, for the host's CPUs."""
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops  # few programs need it

    return gen_xla_ops.xla_call_module(
        list(tensors), version, module, shapes, dtypes, platforms=["CPU"]
    )


def tensor_in(array: Any, device: str, dtype: int) -> Any:
    """An array of numpy's as a tensor, in the same memory where TensorFlow can."""
    context.context().ensure_initialized()
    return EagerTensor(array, device, dtype)


def is_compiled(graph: Any) -> bool:
    """Whether XLA will compile a graph: `jit_compile=True`, here or further out."""
    found: bool = control_flow_util.GraphOrParentsInXlaContext(graph)
    return found


def is_compiled_itself(graph: Any) -> bool:
    """Whether it is the graph of the very function that has `jit_compile=True`."""
    found: bool = control_flow_util.InXlaContext(graph.outer_graph)
    return found
