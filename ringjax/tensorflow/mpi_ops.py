"""Provides every name of Horovod's module of operations. No operation uses MPI.

The public operations are in reductions.py and movement.py. This file has the reductions
that Horovod's own modules call and that programs import from this path. These
reductions add up by default, and accept no compression and no sparse tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ringjax.horovod.api import *  # noqa: F403
from ringjax.horovod.basics import HorovodBasics
from ringjax.horovod.functions import num_rank_is_power_2
from ringjax.ops import ReduceOp
from ringjax.ops import Sum as Sum
from ringjax.runtime import ProcessSet as ProcessSet
from ringjax.runtime import global_process_set as global_process_set
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.graph_collectives import normalize_name
from ringjax.tensorflow.movement import allgather as allgather
from ringjax.tensorflow.movement import alltoall as alltoall
from ringjax.tensorflow.movement import barrier as barrier
from ringjax.tensorflow.movement import broadcast as broadcast
from ringjax.tensorflow.movement import broadcast_ as broadcast_
from ringjax.tensorflow.movement import grouped_allgather as grouped_allgather
from ringjax.tensorflow.movement import join as join
from ringjax.tensorflow.movement import local_rank_op as local_rank_op
from ringjax.tensorflow.movement import local_size_op as local_size_op
from ringjax.tensorflow.movement import (
    process_set_included_op as process_set_included_op,
)
from ringjax.tensorflow.movement import rank_op as rank_op
from ringjax.tensorflow.movement import size_op as size_op
from ringjax.tensorflow.operations import (
    make_spec,
    reduction_options,
    run_allreduce,
    run_reducescatter,
)
from ringjax.tensorflow.tf_types import TensorLike

_basics = HorovodBasics()
_normalize_name = normalize_name
check_num_rank_power_of_2 = num_rank_is_power_2


@do_not_convert
def handle_average_backwards_compatibility(
    op: int | None, average: bool | None
) -> ReduceOp:
    """Returns the reduction that `op`, or the older argument `average`, names.

    Example:
        >>> handle_average_backwards_compatibility(None, None).name
        'Average'
    """
    return ReduceOp(reduction_options("allreduce", average, op, 1.0, 1.0)["reduce_op"])


@do_not_convert
def _allreduce(
    tensor: TensorLike,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    scales = prescale_factor, postscale_factor
    return _grouped_allreduce(
        [tensor], name, op, *scales, ignore_name_scope, process_set
    )[0]


@do_not_convert
def _grouped_allreduce(
    tensors: Sequence[TensorLike],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    options = reduction_options(
        "allreduce", None, op, prescale_factor, postscale_factor
    )
    call = make_spec("allreduce", name, process_set, ignore_name_scope, **options)
    return list(run_allreduce(call, tensors))


@do_not_convert
def _reducescatter(
    tensor: TensorLike,
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    scales = prescale_factor, postscale_factor
    return _grouped_reducescatter(
        [tensor], name, op, ignore_name_scope, process_set, *scales
    )[0]


@do_not_convert
def _grouped_reducescatter(
    tensors: Sequence[TensorLike],
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    options = reduction_options(
        "reducescatter", None, op, prescale_factor, postscale_factor
    )
    call = make_spec("reducescatter", name, process_set, ignore_name_scope, **options)
    return list(run_reducescatter(call, tensors))
