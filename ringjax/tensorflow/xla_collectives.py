"""Collectives in functions that XLA compiles: `tf.function(jit_compile=True)`.

Each collective is a module of StableHLO with one custom call, which TensorFlow puts
into the program. JAX makes the same custom call, on the same communicators. XLA may run
calls that share no value in any order, so two ranks could run them in different orders.
Each call therefore has an additional last result, its *order*, which is the additional
last operand of the next call of the graph. The order cannot leave a branch, a loop or
an inner function, so collectives there are refused. XLA must know all shapes when it
compiles, so collectives whose shapes depend on data of other ranks are refused, too.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from ringjax import _native, runtime
from ringjax.eager import lane
from ringjax.tensorflow import tf_private, xla_handlers
from ringjax.tensorflow.collective_spec import CollectiveSpec
from ringjax.tensorflow.tf_types import Splits
from ringjax.world import timeouts
from ringjax.world.process_set import ProcessSet

Attribute: TypeAlias = bool | int | float | str | list[int]

_RAGGED = ("allgather", "alltoall")
_MODULE_VERSION = 10  # the version of the format of XlaCallModule
_ORDER = "_ringjax_order"  # the attribute of a graph with the order of its last call
_MLIR_DTYPES = {
    tf.bool: "i1",
    tf.complex64: "complex<f32>",
    tf.complex128: "complex<f64>",
    tf.bfloat16: "bf16",
    **{getattr(tf, f"float{n}"): f"f{n}" for n in (16, 32, 64)},
    **{getattr(tf, f"int{n}"): f"i{n}" for n in (8, 16, 32, 64)},
    **{getattr(tf, f"uint{n}"): f"ui{n}" for n in (8, 16, 32, 64)},
}


def run(
    call: CollectiveSpec, tensors: Sequence[tf.Tensor], splits: Splits = None
) -> tuple[list[tf.Tensor], list[list[int]]]:
    """Adds a collective to the current graph, like `graph_collectives.run`.

    If XLA cannot compile the collective, the text of the ValueError names the reason.
    """
    graph = tf.compat.v1.get_default_graph()
    if not tf_private.is_jit_function(graph):
        raise _not_compilable(call, "inside of a branch, a loop or an inner function")
    if splits is not None and not _are_equal(splits, tensors[0].shape, call):
        raise _not_compilable(call, "with splits that are not all the same numbers")
    xla_handlers.ensure_registered()
    process_set = call.process_set()
    native = runtime.communicator(process_set, call.op)
    shapes = []
    for tensor in tensors:
        if not tensor.shape.is_fully_defined():
            raise _not_compilable(call, f"of shape {tensor.shape}, which is not known")
        shapes.append(tensor.shape.as_list())
    rows = [_rows_by_rank(call, shape, native.size) for shape in shapes]
    outs = [
        _result_shape(call, shape, each, native.rank)
        for shape, each in zip(shapes, rows, strict=True)
    ]
    results = [*zip(outs, (t.dtype for t in tensors), strict=True), ([1], tf.uint32)]
    *results, order = _add_custom_call(
        "ringjax_run",
        [*tensors, _order_of(graph)],
        results,
        _attributes(call, native, process_set, rows),
    )
    setattr(graph, _ORDER, order)
    return results, [each[: native.size] for each in rows if call.op in _RAGGED]


def check(
    call: CollectiveSpec,
    tensors: Sequence[tf.Tensor],
    names: Sequence[str],
    every: int,
    first: int,
) -> None:
    """Adds a comparison of parameters between the ranks; see `ffi/check.cc`.

    The call number `first` compares the parameters, and then every `every`th call.
    """
    graph = tf.compat.v1.get_default_graph()
    if not tf_private.is_jit_function(graph) or not all(
        t.dtype in _MLIR_DTYPES for t in tensors
    ):
        return  # the next collective raises the error
    xla_handlers.ensure_registered()
    process_set = call.process_set()
    attributes: dict[str, Attribute] = {
        "comm": runtime.communicator(process_set, call.op).id,
        "every": every,
        "first": first,
        "count": len(tensors),
        "name": call.name,
        "names": "\n".join(name.replace("\n", " ") for name in names),
        "timeout": float(timeouts.current_limit(process_set.timeout)),
    }
    (order,) = _add_custom_call(
        "ringjax_check", [_order_of(graph), *tensors], [([1], tf.uint32)], attributes
    )
    setattr(graph, _ORDER, order)


def _order_of(graph: tf.Graph) -> tf.Tensor:
    """Returns the operand that orders the next call of a graph."""
    order = getattr(graph, _ORDER, None)
    return tf.zeros([1], tf.uint32) if order is None else order


def _are_equal(splits: Splits, shape: tf.TensorShape, call: CollectiveSpec) -> bool:
    if not isinstance(splits, list | tuple) or not shape.rank:
        return False
    size = call.process_set().size()
    return len(splits) == size and all(n * size == shape[0] for n in splits)


def _not_compilable(call: CollectiveSpec, reason: str) -> ValueError:
    return ValueError(
        f"{lane.title(call.op, call.name)}: XLA cannot compile this collective "
        f"{reason}; use tf.function without jit_compile=True"
    )


def _rows_by_rank(call: CollectiveSpec, shape: list[int], size: int) -> list[int]:
    """Returns the attribute `counts` of a call with this tensor alone."""
    if call.op not in (*_RAGGED, "reducescatter"):
        return []
    if not shape:
        raise _not_compilable(call, "of a tensor without dimensions")
    each, more = divmod(shape[0], size)
    if call.op == "reducescatter":
        return [each + (rank < more) for rank in range(size)]
    if call.op == "allgather":
        return [shape[0]] * size
    if more:
        raise _not_compilable(call, f"of {shape[0]} rows for {size} ranks")
    return [each] * (2 * size)  # the rows to each rank, and the rows from each rank


def _result_shape(
    call: CollectiveSpec, shape: list[int], rows: list[int], rank: int
) -> list[int]:
    if call.op == "allgather":
        return [sum(rows), *shape[1:]]
    return [rows[rank], *shape[1:]] if call.op == "reducescatter" else shape


def _attributes(
    call: CollectiveSpec,
    native: _native.Communicator,
    process_set: ProcessSet,
    rows: list[list[int]],
) -> dict[str, Attribute]:
    """Returns the attributes that a call passes to its XLA handler."""
    limit = timeouts.current_limit(process_set.timeout)
    is_broadcast = call.op == "broadcast"
    found: dict[str, Attribute] = {
        "op": _native.COLLECTIVES[call.op],
        "comm": native.id,
        "reduce_op": call.reduce_op,
        "wire": -1,
        "prescale": call.prescale,
        "postscale": call.postscale,
        "root": process_set.ranks.index(call.root) if is_broadcast else 0,
        "size": native.size if rows and rows[0] else 0,
        "counts": [n for each in rows for n in each],
        "name": call.name,
        "names": "",
        **dict.fromkeys(("site", "first", "last", "in_flight"), 0),
    }
    if limit >= 0:
        found["timeout"] = float(limit)
    return found


def _to_mlir(value: Attribute) -> str:
    if isinstance(value, list):
        numbers = ", ".join(map(str, value))
        return f"array<i64: {numbers}>" if value else "array<i64>"
    if isinstance(value, str):
        text = "".join(
            c
            if c.isalnum() or c in "_./:@- "
            else "".join(f"\\{b:02X}" for b in c.encode())
            for c in value
        )
        return f'"{text}"'
    if isinstance(value, float):
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        return f"0x{bits:016X} : f64"
    return f"{int(value)} : i64"


def _add_custom_call(
    target: str,
    tensors: Sequence[tf.Tensor],
    results: Sequence[tuple[list[int], tf.DType]],
    attributes: Mapping[str, Attribute],
) -> list[tf.Tensor]:
    """Adds a node that is one custom call of the handler `target`.

    `results` has the shape and dtype of each result.
    """
    ins = [_mlir_type(t.shape.as_list(), t.dtype) for t in tensors]
    outs = [_mlir_type(*each) for each in results]
    parameters = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(ins))
    operands = ", ".join(f"%a{i}" for i in range(len(ins)))
    values = ", ".join(f"%r#{i}" for i in range(len(outs)))
    ins_text, outs_text = ", ".join(ins), ", ".join(outs)
    config = ", ".join(f"{name} = {_to_mlir(x)}" for name, x in attributes.items())
    module = f"""
    func.func public @main({parameters}) -> ({outs_text}) {{
      %r:{len(outs)} = stablehlo.custom_call @{target}({operands}) {{
        api_version = 4 : i32, has_side_effect = true, backend_config = {{{config}}}
      }} : ({ins_text}) -> ({outs_text})
      return {values} : {outs_text}
    }}"""
    shapes, dtypes = [list(s) for s, _ in results], [d for _, d in results]
    return tf_private.add_xla_call_module(
        tensors, _MODULE_VERSION, module, shapes, dtypes
    )


def _mlir_type(shape: list[int], dtype: tf.DType) -> str:
    return f"tensor<{''.join(f'{n}x' for n in shape)}{_MLIR_DTYPES[dtype]}>"
