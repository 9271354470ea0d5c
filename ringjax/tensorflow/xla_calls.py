"""Collectives in functions that XLA compiles: `tf.function(jit_compile=True)`.

Each is a module of StableHLO with one custom call in it, which TensorFlow puts into the
program: the very call that JAX makes, on the same communicators. XLA runs calls that
share no value in any order, and ranks would disagree; so the last operand and the last
result of each are its *order*, which the next call of the graph takes. A value cannot
leave a branch, a loop or an inner function by the way, so there are no collectives in
those. XLA knows all shapes beforehand: what only the ranks together know is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringjax import _native, runtime
from ringjax.eager import lane
from ringjax.tensorflow import nodes, xla_handlers
from ringjax.tensorflow.calls import Call
from ringjax.world import timeouts

_RAGGED = ("allgather", "alltoall")
_VERSION = 10  # of XlaCallModule
_ORDER = "_ringjax_order"  # an attribute of graphs: what the last call has given
_KINDS = {
    tf.bool: "i1",
    tf.complex64: "complex<f32>",
    tf.complex128: "complex<f64>",
    tf.bfloat16: "bf16",
    **{getattr(tf, f"float{n}"): f"f{n}" for n in (16, 32, 64)},
    **{getattr(tf, f"int{n}"): f"i{n}" for n in (8, 16, 32, 64)},
    **{getattr(tf, f"uint{n}"): f"ui{n}" for n in (8, 16, 32, 64)},
}


def run(
    call: Call, tensors: Sequence[Any], splits: Any = None
) -> tuple[list[Any], list[list[int]]]:
    """Adds an operation to the graph of the moment, as `graph_calls.run`.

    Raises:
        ValueError: this cannot be compiled; the text says what, and what to do.
        RingjaxError: this TensorFlow does not take ringjax's handlers.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    if not nodes.is_compiled_itself(graph):
        raise _impossible(call, "inside of a branch, a loop or an inner function")
    if splits is not None and not _are_equal(splits, tensors[0].shape, call):
        raise _impossible(call, "with splits that are not all the same numbers")
    xla_handlers.ensure_registered()
    members = call.members()
    native = runtime.communicator(members, call.op)
    shapes = []
    for tensor in tensors:
        if not tensor.shape.is_fully_defined():
            raise _impossible(call, f"of shape {tensor.shape}, which is not known")
        shapes.append(tensor.shape.as_list())
    rows = [_rows_of_ranks(call, shape, native) for shape in shapes]
    outs = [
        _shape_of_result(call, shape, each, native.rank)
        for shape, each in zip(shapes, rows, strict=True)
    ]
    order = _order_of(graph)
    kinds = [*zip(outs, (t.dtype for t in tensors), strict=True), ([1], tf.uint32)]
    *results, order = _module(
        *("ringjax_run", [*tensors, order], kinds),
        _attributes(call, native, members, rows),
    )
    setattr(graph, _ORDER, order)
    return results, [each[: native.size] for each in rows if call.op in _RAGGED]


def check(
    call: Call, tensors: Sequence[Any], names: Sequence[str], every: int, first: int
) -> None:
    """Adds a look whether all ranks have the same parameters; see `ffi/check.cc`.

    Args:
        call: has the name, and who takes part.
        tensors: the parameters.
        names: theirs.
        every: at how manieth calls they are compared.
        first: the first call that looks.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    if not nodes.is_compiled_itself(graph) or not all(
        t.dtype in _KINDS for t in tensors
    ):
        return  # no collective can be here, and says so itself
    xla_handlers.ensure_registered()
    members = call.members()
    attributes = {
        "comm": runtime.communicator(members, call.op).id,
        "every": every,
        "first": first,
        "count": len(tensors),
        "name": call.name,
        "names": "\n".join(name.replace("\n", " ") for name in names),
        "timeout": float(timeouts.now(members.timeout)),
    }
    given = [_order_of(graph), *tensors]
    (order,) = _module("ringjax_check", given, [([1], tf.uint32)], _texts(attributes))
    setattr(graph, _ORDER, order)


def _order_of(graph: Any) -> Any:
    """What the next call of a graph takes."""
    order = getattr(graph, _ORDER, None)
    return tf.zeros([1], tf.uint32) if order is None else order


def _are_equal(splits: Any, shape: Any, call: Call) -> bool:
    if not isinstance(splits, list | tuple) or not shape.rank:
        return False
    size = call.members().size()
    return len(splits) == size and all(n * size == shape[0] for n in splits)


def _impossible(call: Call, what: str) -> ValueError:
    return ValueError(
        f"{lane.title(call.op, call.name)}: XLA cannot compile this collective {what}; "
        "use tf.function without jit_compile=True"
    )


def _rows_of_ranks(call: Call, shape: list[int], native: Any) -> list[int]:
    """The attribute `counts` of a tensor."""
    size = native.size
    if call.op not in (*_RAGGED, "reducescatter"):
        return []
    if not shape:
        raise _impossible(call, "of a tensor without dimensions")
    each, more = divmod(shape[0], size)
    if call.op == "reducescatter":
        return [each + (rank < more) for rank in range(size)]
    if call.op == "allgather":
        return [shape[0]] * size
    if more:
        raise _impossible(call, f"of {shape[0]} rows for {size} ranks")
    return [each] * (2 * size)


def _shape_of_result(
    call: Call, shape: list[int], rows: list[int], rank: int
) -> list[int]:
    if call.op == "allgather":
        return [sum(rows), *shape[1:]]
    return [rows[rank], *shape[1:]] if call.op == "reducescatter" else shape


def _attributes(call: Call, native: Any, members: Any, rows: list[list[int]]) -> str:
    """What the handler wants to know, as StableHLO writes it."""
    limit = timeouts.now(members.timeout)
    found: dict[str, Any] = {
        "op": _native.COLLECTIVES[call.op],
        "comm": native.id,
        "reduce_op": call.reduce_op,
        "wire": -1,
        "prescale": call.prescale,
        "postscale": call.postscale,
        "root": members.ranks.index(call.root) if call.op == "broadcast" else 0,
        "size": native.size if rows and rows[0] else 0,
        "counts": [n for each in rows for n in each],
        "name": call.name,
        "names": "",
        **dict.fromkeys(("site", "first", "last", "in_flight"), 0),
    }
    if limit >= 0:
        found["timeout"] = float(limit)
    return _texts(found)


def _texts(attributes: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {_written(x)}" for name, x in attributes.items())


def _written(value: Any) -> str:
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


def _module(
    target: str, tensors: Sequence[Any], results: Sequence[tuple[Any, Any]], text: str
) -> list[Any]:
    """Adds a node that is one custom call; of its results, shapes and dtypes."""
    ins = [_type(t.shape.as_list(), t.dtype) for t in tensors]
    outs = [_type(*each) for each in results]
    given = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(ins))
    names = ", ".join(f"%a{i}" for i in range(len(ins)))
    found = ", ".join(f"%r#{i}" for i in range(len(outs)))
    ins_text, outs_text = ", ".join(ins), ", ".join(outs)
    module = f"""
    func.func public @main({given}) -> ({outs_text}) {{
      %r:{len(outs)} = stablehlo.custom_call @{target}({names}) {{
        api_version = 4 : i32, has_side_effect = true, backend_config = {{{text}}}
      }} : ({ins_text}) -> ({outs_text})
      return {found} : {outs_text}
    }}"""
    shapes, dtypes = [list(s) for s, _ in results], [d for _, d in results]
    return list(nodes.call_module(tensors, _VERSION, module, shapes, dtypes))


def _type(shape: list[int], dtype: Any) -> str:
    return f"tensor<{''.join(f'{n}x' for n in shape)}{_KINDS[dtype]}>"
