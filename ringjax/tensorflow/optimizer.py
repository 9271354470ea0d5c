"""Horovod's DistributedOptimizer: an optimizer that applies all ranks' gradients.

Only which kind of optimizer it is: those of TensorFlow 1 are in legacy_optimizer.py,
those of Keras 3 in ringjax.keras.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from ringjax.ops import Adasum, Average
from ringjax.tensorflow import legacy_optimizer
from ringjax.tensorflow.compression import Compression
from ringjax.tensorflow.gradients import GradientSettings
from ringjax.world.process_set import ProcessSet, global_process_set


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer like `optimizer` that applies the gradients of all ranks.

    All ranks must compute gradients of the same variables.

    Args:
        optimizer: one of Keras 3 on TensorFlow, or a `tf.compat.v1.train.Optimizer`.
            With one of the latter, gradients are reduced by `compute_gradients`.
        name: the beginning of the operations' names; None makes one of the class.
        use_locking: of a `tf.compat.v1.train.Optimizer`.
        device_dense: where dense gradients are reduced.
        device_sparse: where `tf.IndexedSlices` are.
        compression: what travels, for instance `Compression.fp16`.
        sparse_as_dense: `tf.IndexedSlices` travel as dense tensors.
        backward_passes_per_step: gradients of so many steps are added up before they
            are reduced and applied.
        op: Average, Sum, or Adasum (not for optimizers of Keras).
        gradient_predivide_factor: with Average, gradients are divided by it before the
            sum, and multiplied by it and divided by the size after.
        average_aggregated_gradients: divide what was added up by
            `backward_passes_per_step`.
        num_groups: Horovod's former name of an integer for `groups`.
        groups: into how many operations to put all gradients, or the lists of
            variables that are put into one each.
        process_set: the ranks that take part. On others the result is like `optimizer`.
        scale_local_gradients: divide gradients of local variables by the size.

    Raises:
        ValueError: a bad argument, or no optimizer; the text is Horovod's where Horovod
            has one.

    Example:
        >>> import ringjax.tensorflow as hvd, tensorflow as tf
        >>> hvd.init()
        >>> x = tf.Variable(1.0)
        >>> plain = tf.compat.v1.train.GradientDescentOptimizer(0.25)
        >>> optimizer = hvd.DistributedOptimizer(plain)
        >>> optimizer.minimize(lambda: x * x, var_list=[x])
        >>> float(x)
        0.5
    """
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    common: dict[str, Any] = {
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "num_groups": num_groups,
        "groups": groups,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    if isinstance(optimizer, legacy_optimizer.LegacyOptimizer):
        return legacy_optimizer.distributed(
            optimizer,
            partial(GradientSettings, **common),
            name,
            use_locking,
            backward_passes_per_step,
            average_aggregated_gradients,
        )
    keras = importlib.import_module("keras")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "Provided optimizer doesn't inherit from either legacy TensorFlow or Keras "
            f"optimizer: {optimizer}"
        )
    if op == Adasum:
        raise ValueError("op == Adasum is not supported yet with Keras")
    adapter: Any = importlib.import_module("ringjax.tensorflow.keras")
    return adapter.DistributedOptimizer(
        optimizer,
        name=name,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        **common,
    )
