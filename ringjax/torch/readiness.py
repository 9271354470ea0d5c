"""Finds out which gradients all ranks have sent, and which gradients no rank has.

A rank does not see how far the backward passes of other ranks have progressed. In a
round, each rank contributes two flags for every parameter: whether the rank has sent
the gradient, and whether it has a gradient at all. An allreduce adds the flags up, so
all ranks receive the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ringjax.ops import Sum
from ringjax.torch import mpi_ops
from ringjax.world.process_set import ProcessSet


class Readiness(NamedTuple):
    """The combined flags of all ranks after a round; equal on all ranks.

    Attributes:
        everywhere: for each parameter, whether all ranks have sent its gradient.
        anywhere: for each parameter, whether some rank has a gradient.
        final: whether all ranks are about to make a step.
        steps_differ: whether some ranks have made a step since the last gradients were
            reduced, and other ranks have not.
    """

    everywhere: list[bool]
    anywhere: list[bool]
    final: bool
    steps_differ: bool


def submit_round(
    name: str,
    sent: Sequence[bool],
    present: Sequence[bool],
    final: bool,
    stepped: bool | None,
    process_set: ProcessSet,
) -> Callable[[], Readiness]:
    """Submits the allreduce of the flags; returns a function that awaits the result.

    All ranks list the parameters in the same order. `sent` says for each parameter
    whether this rank has sent its gradient, and `present` whether this rank has one.
    `stepped` is None if no gradients were reduced before.
    """
    # The first element counts the ranks that contribute flags. The size of the process
    # set may be larger, because a rank that has called `join` contributes zeros.
    state = (1, final, stepped is True, stepped is False)
    counts = torch.tensor([*sent, *present, *state], dtype=torch.int32)
    handle = mpi_ops.allreduce_async_(
        counts, name=name, op=Sum, process_set=process_set
    )

    def wait() -> Readiness:
        *flags, ranks, finals, made, skipped = mpi_ops.synchronize(handle).tolist()
        return Readiness(
            everywhere=[count == ranks for count in flags[: len(sent)]],
            anywhere=[count > 0 for count in flags[len(sent) :]],
            final=finals == ranks,
            steps_differ=made > 0 and skipped > 0,
        )

    return wait
