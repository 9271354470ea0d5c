"""Which gradients all ranks have sent, and which gradients no rank has.

A rank does not see how far the backward passes of other ranks have come. In a round,
each rank says of every parameter whether the rank has sent its gradient and whether it
has a gradient at all; the sums over the ranks are the answer that all of them get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ringjax.ops import Sum
from ringjax.torch import mpi_ops
from ringjax.world.process_set import ProcessSet


class Readiness(NamedTuple):
    """The result of a round, the same on all ranks.

    Attributes:
        everywhere: for each parameter, whether all ranks have sent its gradient.
        anywhere: for each parameter, whether some rank has a gradient.
        final: whether all ranks are about to make a step.
        apart: whether some ranks have made a step since the gradients before, and
            others have not.
    """

    everywhere: list[bool]
    anywhere: list[bool]
    final: bool
    apart: bool


def submit_round(
    name: str,
    sent: Sequence[bool],
    present: Sequence[bool],
    final: bool,
    stepped: bool | None,
    process_set: ProcessSet,
) -> Callable[[], Readiness]:
    """Submits a round, and returns what waits for its answer.

    Args:
        name: of the round, on all ranks.
        sent: for each parameter, in an order that all ranks have, whether this rank has
            sent its gradient.
        present: likewise, whether this rank has a gradient.
        final: whether this rank is about to make a step.
        stepped: whether it has made one since the gradients before; None if there were
            none.
        process_set: the ranks that take part.

    Raises:
        RingjaxError: as `allreduce`, here or from what is returned.
    """
    # A rank that has joined adds zeros, so the ranks that ask are counted, too.
    state = (1, final, stepped is True, stepped is False)
    counts = torch.tensor([*sent, *present, *state], dtype=torch.int32)
    handle = mpi_ops.allreduce_async_(
        counts, name=name, op=Sum, process_set=process_set
    )

    def answer() -> Readiness:
        *found, ranks, finals, made, left_out = mpi_ops.synchronize(handle).tolist()
        return Readiness(
            [count == ranks for count in found[: len(sent)]],
            [count > 0 for count in found[len(sent) :]],
            finals == ranks,
            made > 0 and left_out > 0,
        )

    return answer
