"""Sums of tensors that have the same bits in any order and on any number of ranks.

A value is rounded once, to a multiple of a unit, and the multiples are added as 64-bit
integers. `ringjax.exact` does the same for JAX; there, the unit of a tensor follows
from the step before, and a step is repeated if its values do not fit. Here all tensors
of a rank are in memory when the ranks meet. So the ranks first agree on the largest
magnitude of each tensor, which gives a unit that fits, and nothing is repeated.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringjax import _native, errors, runtime
from ringjax.eager import dtypes, result_memory
from ringjax.eager.objects import allgather_object
from ringjax.torch.tensors import prepare
from ringjax.world.process_set import ProcessSet, global_process_set

Array = np.ndarray[Any, Any]
# The tensors of one piece. None is a parameter that the piece does not use.
Piece = Sequence[Tensor | None]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INFINITY = 0x7F800000  # the bits of a float32
_LOWEST_UNIT = -125  # kLowestUnit of xla_ext/exact/fixed_point.h
_NO_NUMBERS: Array = np.zeros(0, np.int32)


@dataclass(frozen=True)
class PieceLayout:
    """The names and shapes of a piece's tensors, which are equal on all ranks.

    `kernels` describes what decides the bits of the tensors on this rank.
    """

    op: str
    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    kernels: str = ""

    def texts(self, count: int) -> list[str]:
        """Returns what must be equal on all ranks, with the number of pieces."""
        pairs = zip(self.names, self.shapes, strict=True)
        tensors = [f"{name} of shape {list(shape)}" for name, shape in pairs]
        return [self.kernels, self.op, f"{count} pieces", *tensors]

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    def part(self, places: Sequence[int]) -> PieceLayout:
        """Returns the layout of the tensors at these places only."""
        names = [self.names[i] for i in places]
        return PieceLayout(self.op, names, [self.shapes[i] for i in places])

    def check(self, number: int, piece: Piece) -> None:
        """Raises an error that names a tensor of piece `number` that cannot be added.

        Raises:
            TypeError: a tensor is no dense tensor of floats on the CPU.
            ValueError: the piece has another number of tensors, or another shape.
        """
        if len(piece) != len(self.names):
            raise ValueError(
                f"{self.op}: piece {number} has {len(piece)} tensors, expected "
                f"{len(self.names)}, as the other pieces have"
            )
        for name, shape, tensor in zip(self.names, self.shapes, piece, strict=True):
            if tensor is None:
                continue
            check_tensor(f"{self.op}: {name} of piece {number}", tensor)
            if tuple(tensor.shape) != tuple(shape):
                raise ValueError(
                    f"{self.op}: {name} of piece {number} has the shape "
                    f"{list(tensor.shape)}, expected {list(shape)}"
                )


class Total(NamedTuple):
    """The result of `add_pieces`.

    Attributes:
        means: the mean of each tensor as float32; None if no piece of any rank uses it.
        control: the sums of the control numbers.
    """

    means: list[Tensor | None]
    control: Array


def check_tensor(what: str, tensor: object) -> None:
    """Raises a TypeError if `tensor` is no dense tensor of floats on the CPU."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} is a {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.layout is not torch.strided:
        advice = "sparse tensors have no exact sums; pass tensor.to_dense()"
    elif not tensor.is_cpu:
        advice = "exact sums are computed on the CPU; pass tensor.cpu()"
    elif tensor.dtype not in _FLOATS:
        advice = "expected float32, bfloat16, float16 or float64; sums of integers "
        advice += "are exact by hvd.allreduce(tensor, op=hvd.Sum)"
    else:
        return
    raise TypeError(
        f"{what} has dtype {tensor.dtype}, shape {list(tensor.shape)}, layout "
        f"{tensor.layout} and device {tensor.device}: {advice}"
    )


def add_pieces(
    layout: PieceLayout,
    pieces: Mapping[int, Piece],
    count: int,
    control: Array,
    process_set: ProcessSet = global_process_set,
) -> Total:
    """Adds the pieces of all ranks, and divides by `count`. All ranks call it together.

    `control` is int32, to be added over the ranks on the way. The native core verifies
    checksums of the sums (exact_exchange.h).

    Raises:
        HorovodInternalError: the ranks' layouts or counts differ, or a rank is lost.
    """
    bits = _agreed(layout, _largest(pieces, len(layout.names)), count, process_set)
    used = np.flatnonzero(bits >= 0).tolist()
    layout = layout.part(used)
    own = [[piece[i] for i in used] for piece in pieces.values()]
    width = 62 - (count - 1).bit_length()  # `count` terms of this width fit into int64
    exponents = (bits[used] >> 23) - 127
    units = np.maximum(exponents + 1 - width, _LOWEST_UNIT).astype(np.int32)
    sums, checksum = _add_up(layout, own, units.tolist(), width)
    means = result_memory.empty(sums.shape, np.dtype(np.float32))
    ins = [sums, control, _NO_NUMBERS, units, checksum.view(np.uint32)]
    outs = [means, *(x.copy() for x in ins[1:])]
    counts = [count, *layout.sizes]
    _run("exchange", layout, ins, outs, process_set, counts=counts)
    found: list[Tensor | None] = [None] * len(bits)
    tensors = torch.split(torch.from_numpy(means), layout.sizes)
    for i, shape, tensor in zip(used, layout.shapes, tensors, strict=True):
        finite = bits[i] < _INFINITY
        found[i] = (tensor if finite else tensor.fill_(math.nan)).view(shape)
    return Total(found, outs[1])


def _agreed(
    layout: PieceLayout, bits: Array, count: int, process_set: ProcessSet
) -> Array:
    """Returns the maxima of `bits` over the ranks, after a comparison of the layouts.

    The core would add tensors of equal sizes whose names or shapes differ.
    """
    texts = "\n".join(layout.texts(count)).encode()
    code = np.array([zlib.crc32(texts)], np.uint32).view(np.int32)
    # The maximum of ~x is ~(the minimum of x): all hashes are equal if the maximum and
    # the minimum are.
    words = np.concatenate([bits, code, ~code])
    outs = [np.empty_like(words)]
    try:
        _run("allreduce", layout, [words], outs, process_set, reduce_op="Max")
    except errors.Mismatch:  # all ranks have it: the numbers of tensors differ
        raise _disagreement(layout, count, process_set) from None
    *_, most, least = outs[0]
    if most != ~least:
        raise _disagreement(layout, count, process_set)
    return outs[0][:-2]


def _disagreement(
    layout: PieceLayout, count: int, process_set: ProcessSet
) -> errors.RingjaxError:
    """Returns the error that names what differs. All ranks of the set call it.

    An elastic job goes on without ranks whose kernels differ from those of the first
    rank, because InvalidArgument ends them.
    """
    own = layout.texts(count)
    rows = allgather_object(own, "exact_allreduce.layout", process_set)
    kind: type[errors.RingjaxError] = errors.Mismatch
    for rank, row in zip(process_set.ranks, rows, strict=True):
        pairs = itertools.zip_longest(rows[0], row, fillvalue="no further tensor")
        for place, (first, other) in enumerate(pairs):
            if first == other:
                continue
            remedy = "pass the same tensors and pieces on all ranks"
            if place == 0:
                remedy = "use one version of PyTorch, one kind of CPU, and "
                remedy += "torch.set_num_threads(1) on all ranks"
                kind = kind if own[0] == rows[0][0] else errors.InvalidArgument
            return kind(
                f"{layout.op}: ranks would compute different bits: rank "
                f"{process_set.ranks[0]} has {first}, and rank {rank} has {other}; "
                f"{remedy}"
            )
    return kind(f"{layout.op}: the ranks' calls differ")


def _largest(pieces: Mapping[int, Piece], tensors: int) -> Array:
    """Returns the bits of each tensor's largest magnitude over the pieces, as int32.

    The bits of floats are ordered as the floats. An infinity stands for NaN, too. A
    negative number stands for a tensor that no piece uses.
    """
    tops = np.full(tensors, -1.0)
    for piece in pieces.values():
        for i, tensor in enumerate(piece):
            if tensor is not None and tensor.numel():
                low, high = torch.aminmax(tensor.detach())
                top = max(abs(low.item()), abs(high.item()))
                tops[i] = max(tops[i], math.inf if math.isnan(top) else top)
            elif tensor is not None:
                tops[i] = max(tops[i], 0)
    with np.errstate(over="ignore"):  # a float64 may be infinite as float32
        return tops.astype(np.float32).view(np.int32)


def _add_up(
    layout: PieceLayout, pieces: Sequence[Piece], units: list[int], width: int
) -> tuple[Array, Array]:
    """Returns the sums of this rank's pieces as int64[n], and their checksum."""
    sums = result_memory.empty((sum(layout.sizes),), np.dtype(np.int64))
    sums.fill(0)
    checksum = np.zeros(2, np.uint64)
    for piece in pieces:
        used = [tensor for tensor in piece if tensor is not None]
        refs, held, _ = prepare(layout.op, None, used)
        found = iter(refs)
        leaves = [
            (0, dtypes.NUMBERS["float32"], tuple(shape)) if t is None else next(found)
            for t, shape in zip(piece, layout.shapes, strict=True)
        ]
        _native.exact_add(leaves, units, width, sums, checksum)
        del held  # contiguous copies, which had to live until here
    return sums, checksum


def _run(
    collective: str,
    layout: PieceLayout,
    ins: Sequence[Array],
    outs: Sequence[Array],
    process_set: ProcessSet,
    *,
    reduce_op: str = "Sum",
    counts: Sequence[int] = (),
) -> Sequence[Array]:
    """Runs one collective on this thread, and returns `outs`."""
    communicator = runtime.communicator(process_set, "exact_allreduce")
    try:
        communicator.execute(
            _native.COLLECTIVES[collective],
            _native.REDUCE_OPS[reduce_op],
            ins,
            outs,
            counts=counts,
            name=layout.op.replace("'", ""),  # the core's texts quote the name
            timeout=process_set.limit(),
        )
    except _native.StatusError as error:
        raise errors.from_status(error) from None
    return outs
