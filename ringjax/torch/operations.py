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
from ringjax.eager.lane import Handle
from ringjax.ops import Average, Sum
from ringjax.torch.autograd import Rule, Run, differentiable, tracked
from ringjax.torch.compression import Compression, Compressor
from ringjax.torch.tensors import follow, given, rows_of
from ringjax.world.process_set import ProcessSet


def first(results: Sequence[Tensor]) -> Tensor:
    """The result of an operation on one tensor."""
    return results[0]


def reduction(
    average: bool | None, op: int | None, prescale: float, postscale: float
) -> lane.Call:
    """What a reduction says of itself."""
    op = lane.op_or_average(average, op, stacklevel=3)
    if type(prescale) is not float or type(postscale) is not float:
        prescale = lane.as_float("allreduce", "prescale_factor", prescale)
        postscale = lane.as_float("allreduce", "postscale_factor", postscale)
    number = lane.reduce_op("allreduce", op)
    return {"reduce_op": number, "prescale": prescale, "postscale": postscale}


def elementwise(
    op: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    pick: Callable[[Sequence[Tensor]], Any],
    call: lane.Call,
    in_place: bool = False,
) -> Handle:
    """Submits what writes its results into memory of PyTorch."""
    tensors = list(tensors)
    pieces, held, where = given(op, name, tensors)
    outs = held
    if not in_place:
        pairs = zip(held, pieces, strict=True)
        outs = [_room(op, name, *pair, process_set) for pair in pairs]

    def finish(ticket: Any) -> Any:
        if where:
            follow(ticket, held[0])
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
        (held, outs),
        **(call | where if where else call),
    )


def _room(
    op: str,
    name: str | None,
    tensor: Tensor,
    piece: lane.Piece,
    process_set: ProcessSet,
) -> Tensor:
    """Memory for the result of one tensor."""
    if op == "reducescatter":
        return tensor.new_empty(lane.own_rows(op, name, piece, process_set))
    return torch.empty_like(tensor)


def finished(
    op: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    call: lane.Call,
    in_place: bool = False,
) -> Sequence[Tensor]:
    """The results of `elementwise`, waited for; one tensor's without a handle."""
    if len(tensors) == 1:
        tensor = tensors[0]
        pieces, held, where = given(op, name, tensors)
        if not where:
            source = out = held[0]
            if not in_place:
                out = _room(op, name, source, pieces[0], process_set)
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
    results: Sequence[Tensor] = elementwise(
        op, tensors, name, process_set, tuple, now, in_place
    ).wait()
    return results


def ragged(
    op: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    pick: Callable[[list[tuple[Tensor, list[int]]]], Any],
    splits: Sequence[int] = (),
    waits: bool = False,
) -> Handle:
    """Submits what finds out while it runs how many rows its results have."""
    pieces, held, where = given(op, name, tensors)
    for piece in pieces:
        lane.with_rows(op, name, piece)

    def finish(ticket: Any) -> Any:
        if where:
            follow(ticket, held[0])
        results = []
        for i, tensor in enumerate(held):
            received = list(ticket.received(i))
            rows = rows_of(ticket.output(i), sum(received), tensor)
            results.append((rows, received))
        return pick(results)

    return lane.submit(
        op,
        name,
        pieces,
        [],
        finish,
        process_set,
        held,
        **(where | {"splits": splits, "waits": waits}),
    )


def _compressed(
    tensors: Sequence[Tensor], compression: type[Compressor], run: Run
) -> list[Tensor]:
    packed = [compression.compress(tensor) for tensor in tensors]
    outs = differentiable(run, [tensor for tensor, _ in packed])
    return [
        compression.decompress(out, context)
        for out, (_, context) in zip(outs, packed, strict=True)
    ]


def reduced(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor],
    call: lane.Call,
    process_set: ProcessSet,
) -> list[Tensor]:
    """A differentiable allreduce of `tensors` as one operation."""
    if compression is Compression.none and not tracked(tensors):
        return list(finished("allreduce", tensors, name, process_set, call))

    def rule(gradients: Sequence[Tensor]) -> list[Tensor]:
        return reduced(gradients, None, Compression.none, call, process_set)

    def run(packed: Sequence[Tensor]) -> tuple[Sequence[Tensor], Rule]:
        return finished("allreduce", packed, name, process_set, call), rule

    return _compressed(tensors, compression, run)


def scattered(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor],
    call: lane.Call,
    process_set: ProcessSet,
) -> list[Tensor]:
    """A differentiable reducescatter of `tensors` as one operation."""

    def rule(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        scale = call["prescale"] * call["postscale"]
        scale *= process_set.size() if call["reduce_op"] == Sum else 1
        return gathered([scale * gradient for gradient in gradients], None, process_set)

    def run(packed: Sequence[Tensor]) -> tuple[Sequence[Tensor], Rule]:
        return finished("reducescatter", packed, name, process_set, call), rule

    return _compressed(tensors, compression, run)


def gathered(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet
) -> tuple[Tensor, ...]:
    """A differentiable allgather of `tensors` as one operation."""

    def run(given: Sequence[Tensor]) -> tuple[Sequence[Tensor], Rule]:
        results = ragged(
            *("allgather", given, name, process_set, list), waits=True
        ).wait()
        me = process_set.rank()
        places = [(sum(rows[:me]), rows[me]) for _, rows in results]

        def rule(gradients: Sequence[Tensor]) -> list[Tensor]:
            call = reduction(None, Average, 1.0, 1.0)
            means = reduced(gradients, None, Compression.none, call, process_set)
            pairs = zip(means, places, strict=True)
            return [mean.narrow(0, start, rows) for mean, (start, rows) in pairs]

        return [out for out, _ in results], rule

    return differentiable(run, tensors)
