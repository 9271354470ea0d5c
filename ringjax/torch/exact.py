"""exact_allreduce: means whose bits do not depend on ranks, shares or order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from ringjax import errors
from ringjax.eager import lane
from ringjax.eager.objects import allgather_object
from ringjax.torch.exact_pieces import Array, Piece, PieceLayout, add_pieces
from ringjax.world.process_set import ProcessSet, global_process_set

MOST_PIECES = 65_536


def exact_allreduce(
    tensors: Mapping[int, Sequence[Tensor]],
    pieces: int,
    like: Sequence[Tensor] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Returns the mean over all pieces, with the same bits on any number of ranks.

    A *piece* is a fixed part of the global batch. Each rank passes the tensors of its
    own pieces, such as gradients or losses. The mean depends on the pieces only, not on
    the ranks, their shares, or their order. `ExactGradients` does this for a model.

    Args:
        tensors: the tensors of each piece of this rank, by the number of the piece. All
            pieces have the same number of tensors and the same shapes. float32,
            bfloat16, float16 or float64, on the CPU.
        pieces: the number of pieces of all ranks together. Piece 0 … `pieces` - 1 must
            be given once each.
        like: tensors of the same shapes. Needed only if this rank may have no piece.
        name: names the operation in errors.
        process_set: the ranks that take part; this rank must be among them. All ranks
            call their exact reductions in the same order.

    Returns:
        A float32 tensor for each tensor of a piece. It is NaN everywhere if a value of
        it was NaN or infinite in some piece. A mean below 2**-126 becomes 0.

    Raises:
        TypeError, ValueError: a bad argument; nothing was sent.
        HorovodInternalError: a piece was given twice or not at all; the text names the
            ranks. Or the ranks' tensors differ, or a rank is lost. If an elastic job
            loses a rank, the pieces of that rank are missing.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> own = range(hvd.rank(), 4, hvd.size())  # the pieces of this rank
        >>> losses = {piece: [torch.tensor(piece / 2)] for piece in own}
        >>> hvd.exact_allreduce(losses, pieces=4, like=[torch.zeros(())])
        [tensor(0.7500)]
    """
    name = lane.check_name("exact_allreduce", name)
    layout = _layout(lane.title("exact_allreduce", name), tensors, pieces, like)
    done = np.zeros(pieces, np.int32)
    done[list(tensors)] = 1
    total = add_pieces(layout, tensors, pieces, done, process_set=process_set)
    if (total.control != 1).any():
        raise wrong_pieces(layout.op, total.control, list(tensors), process_set)
    return [mean for mean in total.means if mean is not None]


def check_pieces(op: str, pieces: int) -> None:
    """Raises a ValueError if `pieces` is no possible number of pieces."""
    if type(pieces) is not int or not 1 <= pieces <= MOST_PIECES:
        raise ValueError(
            f"{op}: `pieces` is {pieces!r}, expected 1 … {MOST_PIECES:,}, the pieces "
            "of all ranks together"
        )


def _layout(
    op: str, tensors: Mapping[int, Piece], pieces: int, like: Sequence[Tensor] | None
) -> PieceLayout:
    check_pieces(op, pieces)
    wrong = [p for p in tensors if type(p) is not int or not 0 <= p < pieces]
    if wrong:
        raise ValueError(
            f"{op}: `tensors` has the pieces {wrong}, expected ints from 0 to "
            f"{pieces - 1}"
        )
    example = next(iter(tensors.values()), None) if like is None else like
    if example is None:
        raise ValueError(
            f"{op}: this rank has no piece, so it needs `like`: tensors of the shapes "
            "of a piece, such as list(model.parameters())"
        )
    names = [f"tensor {i}" for i in range(len(example))]
    layout = PieceLayout(op, names, [getattr(t, "shape", ()) for t in example])
    for number, piece in tensors.items():
        layout.check(number, piece)
        if any(tensor is None for tensor in piece):
            raise TypeError(f"{op}: piece {number} has None in place of a tensor")
    return layout


def wrong_pieces(
    op: str, done: Array, own: list[int], process_set: ProcessSet = global_process_set
) -> errors.Mismatch:
    """Returns the error for pieces that were not given once. All ranks call it.

    Args:
        op: names the operation.
        done: how often each piece was given.
        own: the pieces of this rank.
        process_set: the ranks that take part.
    """
    rows = allgather_object(sorted(own), f"{op}.pieces", process_set)
    pairs = zip(process_set.ranks, rows, strict=True)
    given = ", ".join(f"rank {rank}: {list(numbers)}" for rank, numbers in pairs)
    problems = [
        f"pieces {np.flatnonzero(wrong).tolist()} {what}"
        for what, wrong in (
            ("were given by no rank", done == 0),
            ("were given more than once", done > 1),
        )
        if wrong.any()
    ]
    return errors.Mismatch(
        f"{op}: {' and '.join(problems)}, expected each of 0 … {len(done) - 1} once "
        f"({given}); give rank r the pieces range(r, {len(done)}, hvd.size()). An "
        "elastic job that has lost a rank lacks its pieces"
    )
