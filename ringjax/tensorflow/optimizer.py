"""Horovod's DistributedOptimizer: an optimizer that applies all ranks' gradients.

This module only chooses the implementation. Optimizers of TensorFlow 1 are in
legacy_optimizer.py, optimizers of Keras 3 are in ringjax.keras.
"""

from __future__ import annotations

import importlib
from typing import Any

from ringjax.horovod.gradient_options import check_reduction
from ringjax.ops import Adasum, Average
from ringjax.tensorflow import legacy_optimizer
from ringjax.tensorflow.compression import Compression, Compressor
from ringjax.tensorflow.gradients import GradientSettings
from ringjax.tensorflow.tf_types import Groups, Optimizer
from ringjax.world.process_set import ProcessSet, global_process_set


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """Makes an optimizer like `optimizer` that applies the gradients of all ranks.

    All ranks must compute gradients of the same variables.

    Args:
        optimizer: an optimizer of Keras 3 on TensorFlow, or a
            `tf.compat.v1.train.Optimizer`, whose `compute_gradients` then reduces.
        name: the prefix of the operations' names; None derives it from the class.
        use_locking: an argument of `tf.compat.v1.train.Optimizer`.
        backward_passes_per_step: the number of steps whose gradients are added up
            before they are reduced and applied.
        op: Average, Sum, or Adasum (not for optimizers of Keras).
        average_aggregated_gradients: whether the sums of several steps are divided by
            `backward_passes_per_step`.
        device_dense, device_sparse: arguments of Horovod without effect.
        compression, sparse_as_dense: as for `DistributedGradientTape`.
        num_groups, groups, process_set: as for `DistributedGradientTape`.
        gradient_predivide_factor: as for `DistributedGradientTape`.
        scale_local_gradients: as for `DistributedGradientTape`.

    Raises:
        ValueError: an argument is wrong, or `optimizer` is no optimizer; the text is
            Horovod's if Horovod has one.

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
    check_reduction(op, gradient_predivide_factor, backward_passes_per_step)
    del device_dense, device_sparse
    common: dict[str, Any] = {
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
        unnamed_adasum = op == Adasum and name is None
        prefix = "DistributedDelta" if unnamed_adasum else "Distributed"
        name = name or f"{prefix}{type(optimizer).__name__}"
        settings = GradientSettings(name, **common)
        if op == Adasum:
            return legacy_optimizer._DistributedAdasumOptimizer(
                optimizer, settings, use_locking, backward_passes_per_step
            )
        return legacy_optimizer._DistributedOptimizer(
            optimizer,
            settings,
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
    adapter = importlib.import_module("ringjax.tensorflow.keras")
    return adapter.DistributedOptimizer(
        optimizer,
        name=name,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        **common,
    )
