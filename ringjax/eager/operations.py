"""How operations on arrays run: arguments become memory, and memory results.

The public functions are in reductions.py and movement.py. The argument checks that need
no other rank and no knowledge of the framework are the core's (`CheckSubmission`); the
ranks' agreement is negotiation's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ringjax import _native, errors, runtime
from ringjax.eager import lane
from ringjax.eager.handle import Handle
from ringjax.eager.operands import Array, Operand, output_array, to_operand

Outs = Sequence[Any] | None


def first(results: list[Any]) -> Any:
    """The result of an operation on one array."""
    return results[0]


def as_list(out: Any) -> Outs:
    """Where the result of an operation on one array goes; None: into new memory."""
    return None if out is None else [out]


def operands(op: str, name: str | None, tensors: Sequence[Any]) -> list[Operand]:
    """The arguments of a grouped operation as memory."""
    if not isinstance(tensors, list | tuple) or not tensors:
        raise ValueError(
            f"{lane.title(op, name)}: expected a list or tuple of tensors, not empty"
        )
    return [to_operand(op, name, tensor) for tensor in tensors]


def try_blocking(
    op: str,
    tensor: Any,
    out: Any,
    name: str | None,
    process_set: runtime.ProcessSet,
    shape: tuple[int, ...] | None = None,
    reduce_op: int = 1,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
) -> Array | None:
    """Runs an operation on one plain numpy array from its beginning to its end.

    That is one call of the core: a short operation takes less time than a handle, and
    what belongs to it, would.

    Args:
        shape: of a new result, unless it is the tensor's; the core checks `out`.

    Returns:
        The result; None: nothing has happened, since this is not for such operands.
    """
    if type(tensor) is not np.ndarray:
        return None
    native = runtime.lane(process_set, op)
    called = lane.check_name(op, name) or partial(lane.next_name, op, process_set)
    if out is None:
        out = np.empty(tensor.shape if shape is None else shape, tensor.dtype)
    try:
        taken = native.run_plain(
            lane.COLLECTIVES[op],
            called,
            tensor,
            out,
            reduce_op,
            root,
            prescale,
            postscale,
            process_set.limit(),
        )
    except _native.StatusError as error:
        raise errors.from_status(error) from None
    return out if taken else None


def reduce_blocking(
    op: str,
    tensor: Any,
    name: str | None,
    reduce_op: int,
    prescale: float,
    postscale: float,
    process_set: runtime.ProcessSet,
    out: Any,
) -> Any:
    """An allreduce or reducescatter of one tensor, and its result."""
    kind = lane.reduce_op(op, reduce_op)
    if type(prescale) is not float or type(postscale) is not float:
        prescale = lane.as_float(op, "prescale_factor", prescale)
        postscale = lane.as_float(op, "postscale_factor", postscale)
    shape = None
    new = out is None and type(tensor) is np.ndarray
    if new and op == "reducescatter" and tensor.ndim:
        shape = lane.own_shape(op, tensor.shape, process_set)
    result = try_blocking(
        op, tensor, out, name, process_set, shape, kind, prescale, postscale
    )
    if result is not None:
        return result
    return reduce(
        *(op, [tensor], name, kind, prescale, postscale, process_set, first),
        outs=as_list(out),
        waits=True,
    ).wait()


def reduce(
    op: str,
    tensors: Sequence[Any],
    name: str | None,
    reduce_op: int,
    prescale: float,
    postscale: float,
    process_set: runtime.ProcessSet,
    result: Callable[[list[Any]], Any],
    outs: Outs,
    *,
    waits: bool = False,
) -> Handle:
    """Submits an allreduce or reducescatter."""
    runtime.lane(process_set, op)  # not initialised, or not a member
    given = operands(op, name, tensors)
    shapes = [
        lane.scattered_shape(op, name, g.ref, process_set)
        if op == "reducescatter"
        else g.array.shape
        for g in given
    ]
    return submit(
        *(op, name, given, shapes, outs, process_set, result),
        reduce_op=lane.reduce_op(op, reduce_op),
        prescale=lane.as_float(op, "prescale_factor", prescale),
        postscale=lane.as_float(op, "postscale_factor", postscale),
        waits=waits,
    )


def submit(
    op: str,
    name: str | None,
    given: list[Operand],
    shapes: Sequence[tuple[int, ...]],
    outs: Outs,
    process_set: runtime.ProcessSet,
    result: Callable[[list[Any]], Any],
    **call: Any,
) -> Handle:
    """Submits what has results of known shapes, into `outs` or new memory."""
    places = _output_arrays(op, name, given, shapes, outs)
    if places is None:
        places = [g.new_array(shape) for g, shape in zip(given, shapes, strict=True)]

    def finish(_: Any) -> Any:
        if outs is not None:
            return result(list(outs))
        return result([g.restore(p) for g, p in zip(given, places, strict=True)])

    return lane.submit(
        op,
        name,
        [g.ref for g in given],
        [p.ctypes.data for p in places],
        finish=finish,
        process_set=process_set,
        keep=([g.array for g in given], places),
        **call,
    )


def submit_rows(
    op: str,
    name: str | None,
    given: list[Operand],
    outs: Outs,
    process_set: runtime.ProcessSet,
    result: Callable[[list[Any], list[list[int]]], Any],
    **call: Any,
) -> Handle:
    """Submits an allgather or alltoall, whose results are as long as the ranks make it.

    Args:
        result: makes the caller's result from the arrays, and the rows that came from
            each rank for each of them.
    """
    refs = [lane.require_rows(op, name, g.ref) for g in given]
    shapes = [(None, *g.array.shape[1:]) for g in given]
    places = _output_arrays(op, name, given, shapes, outs)

    def finish(work: Any) -> Any:
        received = [list(work.received(i)) for i in range(len(given))]
        if outs is None:
            made = [
                g.from_core_memory(work.output(i), sum(received[i]))
                for i, g in enumerate(given)
            ]
            return result(made, received)
        for out, rows in zip(outs, received, strict=True):
            if len(out) != sum(rows):
                raise ValueError(
                    f"{lane.title(op, name, refs)}: out has {len(out)} rows, and the "
                    f"result {sum(rows)}"
                )
        return result(list(outs), received)

    return lane.submit(
        *(op, name, refs, [p.ctypes.data for p in places or []]),
        finish=finish,
        process_set=process_set,
        keep=([g.array for g in given], places),
        rooms=[p.nbytes for p in places or []],
        **call,
    )


def _output_arrays(
    op: str,
    name: str | None,
    given: list[Operand],
    shapes: Sequence[tuple[int | None, ...]],
    outs: Outs,
) -> list[Array] | None:
    if outs is None:
        return None
    if not isinstance(outs, list | tuple) or len(outs) != len(given):
        raise ValueError(
            f"{lane.title(op, name)}: out must be a list of {len(given)} arrays, one "
            "for each tensor"
        )
    return [
        output_array(op, name, out, g, shape)
        for out, g, shape in zip(outs, given, shapes, strict=True)
    ]
