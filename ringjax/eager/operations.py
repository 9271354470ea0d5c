"""Runs eager operations: converts arguments to memory, and memory to results.

The public functions are in `reductions.py` and `movement.py`. The native core checks
the arguments of this rank (`CheckSubmission`), and negotiation checks that the
arguments of all ranks match.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack, cast

import numpy as np

from ringjax import _native, errors, runtime
from ringjax.eager import lane, result_memory
from ringjax.eager.handle import Handle
from ringjax.eager.operands import AnyArray, Array, Operand, output_array, to_operand

Outs = Sequence[AnyArray] | None
# A function that makes an operation's result from the list of its result tensors.
Pick = Callable[[list[AnyArray]], AnyArray]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def first(results: list[AnyArray]) -> AnyArray:
    """Returns the result of an operation on one array."""
    return results[0]


def as_list(out: AnyArray) -> Outs:
    """Returns the argument `out` of an operation on one array as a list, or None."""
    return None if out is None else [out]


def operands(op: str, name: str | None, tensors: Sequence[AnyArray]) -> list[Operand]:
    """Converts the tensors of an operation. Raises ValueError if there are none."""
    if not isinstance(tensors, list | tuple) or not tensors:
        raise ValueError(
            f"{lane.title(op, name)}: expected a list or tuple of tensors, not empty"
        )
    return [to_operand(op, name, tensor) for tensor in tensors]


def runs_plain(function: _Function) -> _Function:
    """Decorates a function of one tensor, named as its operation, which waits.

    If the tensor and `out` are contiguous numpy arrays and the other arguments are
    usual, the native core checks and runs a call without `function`, because a short
    operation takes little longer than a few lines of Python. All other calls, and so
    all calls with wrong arguments, call `function`.
    """
    op = function.__name__

    def new_result(tensor: Array, process_set: runtime.ProcessSet) -> Array:
        shape = tensor.shape
        if op == "reducescatter":
            shape = lane.scattered_shape(op, None, (0, 0, shape), process_set)
        return result_memory.empty(shape, tensor.dtype)

    call = _native.plain_call(
        lane.COLLECTIVES[op],
        function,
        process_set=runtime.global_process_set,
        array_type=np.ndarray,
        new_result=new_result,
        next_name=partial(lane.next_name, op),
        error_of=errors.from_status,
    )
    return cast(_Function, functools.update_wrapper(call, function))


def submit_reduction(
    collective: str,
    tensors: Sequence[AnyArray],
    name: str | None,
    process_set: runtime.ProcessSet,
    outs: Outs,
    options: lane.LaneOptions,
    *,
    pick: Pick = list,
) -> Handle:
    """Submits an allreduce or reducescatter."""
    # Raises an error before init, and on ranks outside of the process set.
    runtime.lane(process_set, collective)
    given = operands(collective, name, tensors)
    shapes = [
        lane.scattered_shape(collective, name, g.ref, process_set)
        if collective == "reducescatter"
        else g.array.shape
        for g in given
    ]
    return submit(
        collective, name, given, shapes, outs, process_set, pick=pick, **options
    )


def submit(
    op: str,
    name: str | None,
    given: list[Operand],
    shapes: Sequence[tuple[int, ...]],
    outs: Outs,
    process_set: runtime.ProcessSet,
    *,
    pick: Pick,
    **options: Unpack[lane.LaneOptions],
) -> Handle:
    """Submits an operation whose results have known shapes.

    If `outs` is None, this function allocates memory for the results.
    """
    memory = _output_arrays(op, name, given, shapes, outs)
    if memory is None:
        memory = [g.new_array(shape) for g, shape in zip(given, shapes, strict=True)]

    def finish(_: _native.Work) -> AnyArray:
        if outs is not None:
            return pick(list(outs))
        return pick([g.restore(m) for g, m in zip(given, memory, strict=True)])

    return lane.submit(
        op,
        name,
        [g.ref for g in given],
        [m.ctypes.data for m in memory],
        finish,
        process_set,
        keep=([g.array for g in given], memory),
        **options,
    )


def submit_ragged(
    op: str,
    name: str | None,
    given: list[Operand],
    outs: Outs,
    process_set: runtime.ProcessSet,
    *,
    pick: Callable[[list[AnyArray], list[list[int]]], AnyArray],
    splits: Sequence[int] = (),
    waits: bool = False,
) -> Handle:
    """Submits an allgather or alltoall, whose result has an unknown number of rows.

    If `outs` is None, the native core allocates memory for the results.

    Args:
        pick: makes the caller's result from the result arrays and, for each array, the
            number of rows from each rank.
    """
    refs = [lane.require_rows(op, name, g.ref) for g in given]
    shapes = [(None, *g.array.shape[1:]) for g in given]
    memory = _output_arrays(op, name, given, shapes, outs) or []

    def finish(work: _native.Work) -> AnyArray:
        received = [list(work.received(i)) for i in range(len(given))]
        if outs is None:
            made = [
                g.from_core_memory(work.output(i), sum(rows))
                for i, (g, rows) in enumerate(zip(given, received, strict=True))
            ]
            return pick(made, received)
        for out, rows in zip(outs, received, strict=True):
            if len(out) != sum(rows):
                raise ValueError(
                    f"{lane.title(op, name, refs)}: out has {len(out)} rows, and the "
                    f"result {sum(rows)}"
                )
        return pick(list(outs), received)

    return lane.submit(
        op,
        name,
        refs,
        [m.ctypes.data for m in memory],
        finish,
        process_set,
        keep=([g.array for g in given], memory),
        rooms=[m.nbytes for m in memory],
        splits=splits,
        waits=waits,
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
