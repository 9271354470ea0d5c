"""How operations on tensors run: submitted, finished, differentiated.

The public functions, which say what is reduced or moved, are in reductions.py and
movement.py. Derivatives are operations again, so the rules that several of them share
are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringjax.eager import lane
from ringjax.eager.handle import Handle
from ringjax.ops import Average, Sum
from ringjax.torch.autograd import Backward, Forward, apply_function, needs_graph
from ringjax.torch.compression import Compression, Compressor
from ringjax.torch.tensors import prepare, rows_from_memory, wait_on_stream
from ringjax.world.process_set import ProcessSet


def first_result(results: Sequence[Tensor]) -> Tensor:
    """The result of an operation on one tensor."""
    return results[0]


def reduction_arguments(
    average: bool | None, op: int | None, prescale: float, postscale: float
) -> lane.LaneOptions:
    """What a reduction says of itself."""
    op = lane.op_or_average(average, op, stacklevel=3)
    if type(prescale) is not float or type(postscale) is not float:
        prescale = lane.as_float("allreduce", "prescale_factor", prescale)
        postscale = lane.as_float("allreduce", "postscale_factor", postscale)
    number = lane.reduce_op("allreduce", op)
    return {"reduce_op": number, "prescale": prescale, "postscale": postscale}


def submit_elementwise(
    op: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    pick: Callable[[Sequence[Tensor]], Any],
    call: lane.LaneOptions,
    in_place: bool = False,
) -> Handle:
    """Submits what writes its results into memory of PyTorch."""
    tensors = list(tensors)
    pieces, held, where = prepare(op, name, tensors)
    outs = held
    if not in_place:
        pairs = zip(held, pieces, strict=True)
        outs = [_new_output(op, name, *pair, process_set) for pair in pairs]

    def finish(ticket: Any) -> Any:
        if where:
            wait_on_stream(ticket, held[0])
        if not in_place:
            return pick(outs)
        for tensor, memory in zip(tensors, held, strict=True):
            if memory is not tensor:  # it was not contiguous
                tensor.detach().copy_(memory)
        return pick(tensors)

    return lane.submit(
        op,
        name,
        pieces,
        [out.data_ptr() for out in outs],
        finish,
        process_set,
        keep=(held, outs),
        **(call | where if where else call),
    )


def _new_output(
    op: str,
    name: str | None,
    tensor: Tensor,
    piece: lane.TensorRef,
    process_set: ProcessSet,
) -> Tensor:
    """Memory for the result of one tensor."""
    if op == "reducescatter":
        return tensor.new_empty(lane.scattered_shape(op, name, piece, process_set))
    return torch.empty_like(tensor)


def run_elementwise(
    op: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    call: lane.LaneOptions,
    in_place: bool = False,
) -> Sequence[Tensor]:
    """Submits an elementwise operation and waits for its results."""
    if len(tensors) == 1:
        tensor = tensors[0]
        pieces, held, where = prepare(op, name, tensors)
        if not where:
            source = out = held[0]
            if not in_place:
                out = _new_output(op, name, source, pieces[0], process_set)
            lane.run(
                *(op, name, pieces[0], out.data_ptr(), process_set, (source, out)),
                **call,
            )
            if not in_place:
                return [out]
            if source is not tensor:  # it was not contiguous
                tensor.detach().copy_(source)
            return tensors
    now = call | lane.WAITS
    results: Sequence[Tensor] = submit_elementwise(
        op, tensors, name, process_set, tuple, now, in_place
    ).wait()
    return results


def submit_ragged(
    op: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    pick: Callable[[list[tuple[Tensor, list[int]]]], Any],
    splits: Sequence[int] = (),
    waits: bool = False,
) -> Handle:
    """Submits what finds out while it runs how many rows its results have."""
    pieces, held, where = prepare(op, name, tensors)
    for piece in pieces:
        lane.require_rows(op, name, piece)

    def finish(ticket: Any) -> Any:
        if where:
            wait_on_stream(ticket, held[0])
        results = []
        for i, tensor in enumerate(held):
            received = list(ticket.received(i))
            rows = rows_from_memory(ticket.output(i), sum(received), tensor)
            results.append((rows, received))
        return pick(results)

    return lane.submit(
        op,
        name,
        pieces,
        [],
        finish,
        process_set,
        keep=held,
        **(where | {"splits": splits, "waits": waits}),
    )


def _compressed(
    tensors: Sequence[Tensor], compression: type[Compressor], run: Forward
) -> list[Tensor]:
    packed = [compression.compress(tensor) for tensor in tensors]
    outs = apply_function(run, [tensor for tensor, _ in packed])
    return [
        compression.decompress(out, context)
        for out, (_, context) in zip(outs, packed, strict=True)
    ]


def differentiable_allreduce(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor],
    call: lane.LaneOptions,
    process_set: ProcessSet,
) -> list[Tensor]:
    """A differentiable allreduce of `tensors` as one operation."""
    if compression is Compression.none and not needs_graph(tensors):
        return list(run_elementwise("allreduce", tensors, name, process_set, call))

    def rule(gradients: Sequence[Tensor]) -> list[Tensor]:
        return differentiable_allreduce(
            gradients, None, Compression.none, call, process_set
        )

    def run(packed: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        return run_elementwise("allreduce", packed, name, process_set, call), rule

    return _compressed(tensors, compression, run)


def differentiable_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor],
    call: lane.LaneOptions,
    process_set: ProcessSet,
) -> list[Tensor]:
    """A differentiable reducescatter of `tensors` as one operation."""

    def rule(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        scale = call["prescale"] * call["postscale"]
        scale *= process_set.size() if call["reduce_op"] == Sum else 1
        return differentiable_allgather(
            [scale * gradient for gradient in gradients], None, process_set
        )

    def run(packed: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        return run_elementwise("reducescatter", packed, name, process_set, call), rule

    return _compressed(tensors, compression, run)


def differentiable_allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet
) -> tuple[Tensor, ...]:
    """A differentiable allgather of `tensors` as one operation."""

    def run(given: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        results = submit_ragged(
            *("allgather", given, name, process_set, list), waits=True
        ).wait()
        me = process_set.rank()
        places = [(sum(rows[:me]), rows[me]) for _, rows in results]

        def rule(gradients: Sequence[Tensor]) -> list[Tensor]:
            call = reduction_arguments(None, Average, 1.0, 1.0)
            means = differentiable_allreduce(
                gradients, None, Compression.none, call, process_set
            )
            pairs = zip(means, places, strict=True)
            return [mean.narrow(0, start, rows) for mean, (start, rows) in pairs]

        return [out for out, _ in results], rule

    return apply_function(run, tensors)
