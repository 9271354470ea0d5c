"""Submits, finishes and differentiates operations on PyTorch tensors.

reductions.py and movement.py have Horovod's public functions. This file has the parts
that Horovod's functions share, and the backward functions, which are operations
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ringjax import _native
from ringjax.eager import lane
from ringjax.eager.handle import Handle
from ringjax.ops import Average, Sum
from ringjax.torch.autograd import Backward, Forward, apply_function, needs_graph
from ringjax.torch.compression import Compression, Compressor
from ringjax.torch.tensors import (
    new_result,
    prepare,
    rows_from_memory,
    wait_on_stream,
)
from ringjax.world.process_set import ProcessSet


def first(results: Sequence[Tensor]) -> Tensor:
    """Returns the result of an operation on a single tensor."""
    return results[0]


def reduction_options(
    average: bool | None, op: int | None, prescale: float, postscale: float
) -> lane.LaneOptions:
    """Checks the arguments of a reduction and returns them as options of the lane."""
    op = lane.op_or_average(average, op, stacklevel=3)
    return lane.reduction_options("allreduce", op, prescale, postscale)


def submit(
    op: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    options: lane.LaneOptions,
    *,
    pick: Callable[[Sequence[Tensor]], object],
    in_place: bool = False,
) -> Handle:
    """Submits an operation with results of known shapes, which PyTorch allocates.

    `pick` makes the result of the handle from the output tensors.
    """
    tensors = list(tensors)
    refs, held, on_device = prepare(op, name, tensors)
    outs = held
    if not in_place:
        pairs = zip(held, refs, strict=True)
        outs = [_new_output(op, name, *pair, process_set) for pair in pairs]

    def finish(work: _native.Work) -> object:
        if on_device:
            wait_on_stream(work, held[0])
        if not in_place:
            return pick(outs)
        for tensor, memory in zip(tensors, held, strict=True):
            if memory is not tensor:  # the tensor was not contiguous
                tensor.detach().copy_(memory)
        return pick(tensors)

    addresses, keep = [out.data_ptr() for out in outs], (held, outs)
    if on_device:
        options = options | on_device
    return lane.submit(
        op, name, refs, addresses, finish, process_set, keep=keep, **options
    )


def _new_output(
    op: str,
    name: str | None,
    tensor: Tensor,
    ref: lane.TensorRef,
    process_set: ProcessSet,
) -> Tensor:
    shape: Sequence[int] = tensor.shape
    if op == "reducescatter":
        shape = lane.scattered_shape(op, name, ref, process_set)
    return new_result(tensor, shape)


def run(
    op: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    options: lane.LaneOptions,
    *,
    in_place: bool = False,
) -> Sequence[Tensor]:
    """Runs an operation as `submit` does, and returns its results."""
    # The most frequent operation, on a single tensor on the host, is one call of the
    # core without a handle.
    if len(tensors) == 1:
        tensor = tensors[0]
        refs, held, on_device = prepare(op, name, tensors)
        if not on_device:
            source = out = held[0]
            if not in_place:
                out = _new_output(op, name, source, refs[0], process_set)
            address, keep = out.data_ptr(), (source, out)
            lane.run(op, name, refs[0], address, process_set, keep, **options)
            if not in_place:
                return [out]
            if source is not tensor:  # the tensor was not contiguous
                tensor.detach().copy_(source)
            return tensors
    options = options | lane.WAITS
    handle = submit(
        op, tensors, name, process_set, options, pick=tuple, in_place=in_place
    )
    results: Sequence[Tensor] = handle.wait()
    return results


def submit_ragged(
    op: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    pick: Callable[[list[tuple[Tensor, list[int]]]], object],
    splits: Sequence[int] = (),
    waits: bool = False,
) -> Handle:
    """Submits an operation whose results have as many rows as the other ranks send.

    `pick` makes the result of the handle from pairs of an output tensor and the numbers
    of rows that each rank has sent. `splits` and `waits` are those of `LaneOptions`.
    """
    refs, held, on_device = prepare(op, name, tensors)
    for ref in refs:
        lane.require_rows(op, name, ref)

    def finish(work: _native.Work) -> object:
        if on_device:
            wait_on_stream(work, held[0])
        results = []
        for i, tensor in enumerate(held):
            received = list(work.received(i))
            rows = rows_from_memory(work.output(i), sum(received), tensor)
            results.append((rows, received))
        return pick(results)

    options = on_device | {"splits": splits, "waits": waits}
    return lane.submit(op, name, refs, [], finish, process_set, keep=held, **options)


def _apply_compressed(
    tensors: Sequence[Tensor], compression: type[Compressor], forward: Forward
) -> list[Tensor]:
    packed = [compression.compress(tensor) for tensor in tensors]
    outs = apply_function(forward, [tensor for tensor, _ in packed])
    return [
        compression.decompress(out, context)
        for out, (_, context) in zip(outs, packed, strict=True)
    ]


def allreduce_tensors(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor],
    options: lane.LaneOptions,
    process_set: ProcessSet,
) -> list[Tensor]:
    """Allreduces `tensors` in one operation. Backward is an allreduce, too."""
    if compression is Compression.none and not needs_graph(tensors):
        return list(run("allreduce", tensors, name, process_set, options))

    def backward(gradients: Sequence[Tensor]) -> list[Tensor]:
        return allreduce_tensors(
            gradients, None, Compression.none, options, process_set
        )

    def forward(packed: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        outs = run("allreduce", packed, name, process_set, options)
        return outs, backward

    return _apply_compressed(tensors, compression, forward)


def allreduce_mean(
    gradients: Sequence[Tensor], process_set: ProcessSet
) -> list[Tensor]:
    """Averages gradients over the ranks, as Horovod's backward functions do."""
    options = reduction_options(None, Average, 1.0, 1.0)
    return allreduce_tensors(gradients, None, Compression.none, options, process_set)


def reducescatter_tensors(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor],
    options: lane.LaneOptions,
    process_set: ProcessSet,
) -> list[Tensor]:
    """Reduces and scatters `tensors` in one operation. Backward is an allgather."""

    def backward(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        scale = options["prescale"] * options["postscale"]
        scale *= process_set.size() if options["reduce_op"] == Sum else 1
        return allgather_tensors(
            [scale * gradient for gradient in gradients], None, process_set
        )

    def forward(packed: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        outs = run("reducescatter", packed, name, process_set, options)
        return outs, backward

    return _apply_compressed(tensors, compression, forward)


def allgather_tensors(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet
) -> tuple[Tensor, ...]:
    """Gathers `tensors` in one operation. Backward averages the gradients."""

    def forward(inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Backward]:
        results = submit_ragged(
            "allgather", inputs, name, process_set, pick=list, waits=True
        ).wait()
        rank = process_set.rank()
        # The first row and the number of rows that this rank has in each output.
        own_rows = [(sum(rows[:rank]), rows[rank]) for _, rows in results]

        def backward(gradients: Sequence[Tensor]) -> list[Tensor]:
            means = allreduce_mean(gradients, process_set)
            pairs = zip(means, own_rows, strict=True)
            return [mean.narrow(0, start, rows) for mean, (start, rows) in pairs]

        return [out for out, _ in results], backward

    return apply_function(forward, tensors)
