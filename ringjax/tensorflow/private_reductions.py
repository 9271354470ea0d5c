"""Horovod's reductions as its own modules call them: plain, and a sum by default.

For programs that import them from `mpi_ops`; `allreduce` and `reducescatter`, which
average by default and know compression and sparse tensors, are in reductions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringjax.ops import ReduceOp, Sum
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.operations import (
    reduction_options,
    run_allreduce,
    run_reducescatter,
)
from ringjax.world.process_set import ProcessSet, global_process_set


@do_not_convert
def handle_average_backwards_compatibility(
    op: int | None, average: bool | None
) -> ReduceOp:
    """The reduction that is meant by Horovod's new argument, or by its old one.

    Example:
        >>> handle_average_backwards_compatibility(None, None).name
        'Average'
    """
    return ReduceOp(reduction_options("allreduce", average, op, 1.0, 1.0)["reduce_op"])


@do_not_convert
def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    how = reduction_options("allreduce", None, op, prescale_factor, postscale_factor)
    return run_allreduce([tensor], name, process_set, ignore_name_scope, how)[0]


@do_not_convert
def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    how = reduction_options("allreduce", None, op, prescale_factor, postscale_factor)
    return run_allreduce(tensors, name, process_set, ignore_name_scope, how)


@do_not_convert
def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    how = reduction_options(
        "reducescatter", None, op, prescale_factor, postscale_factor
    )
    return run_reducescatter([tensor], name, process_set, ignore_name_scope, how)[0]


@do_not_convert
def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    how = reduction_options(
        "reducescatter", None, op, prescale_factor, postscale_factor
    )
    return run_reducescatter(tensors, name, process_set, ignore_name_scope, how)
