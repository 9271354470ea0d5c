"""Horovod's reductions as its own modules call them: plain, and a sum by default.

For programs that import them from `mpi_ops`; `allreduce` and `reducescatter`, which
average by default and know compression and sparse tensors, are in reductions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringjax.ops import ReduceOp, Sum
from ringjax.tensorflow.as_written import as_written
from ringjax.tensorflow.operations import reduced, reduction, scattered
from ringjax.world.process_set import ProcessSet, global_process_set


@as_written
def handle_average_backwards_compatibility(
    op: int | None, average: bool | None
) -> ReduceOp:
    """The reduction that is meant by Horovod's new argument, or by its old one.

    Example:
        >>> handle_average_backwards_compatibility(None, None).name
        'Average'
    """
    return ReduceOp(reduction("allreduce", average, op, 1.0, 1.0)["reduce_op"])


@as_written
def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    how = reduction("allreduce", None, op, prescale_factor, postscale_factor)
    return reduced([tensor], name, process_set, ignore_name_scope, how)[0]


@as_written
def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    how = reduction("allreduce", None, op, prescale_factor, postscale_factor)
    return reduced(tensors, name, process_set, ignore_name_scope, how)


@as_written
def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    how = reduction("reducescatter", None, op, prescale_factor, postscale_factor)
    return scattered([tensor], name, process_set, ignore_name_scope, how)[0]


@as_written
def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    how = reduction("reducescatter", None, op, prescale_factor, postscale_factor)
    return scattered(tensors, name, process_set, ignore_name_scope, how)
