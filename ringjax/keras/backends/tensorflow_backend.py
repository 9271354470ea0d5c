"""Keras on TensorFlow: gradients and values go the way of `ringjax.tensorflow`.

In train steps that Keras runs eagerly and in those that it makes graphs of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringjax.compression import WireDtype
from ringjax.keras.backends.base_backend import Backend, ReductionOptions
from ringjax.ops import Min, ReduceOp
from ringjax.tensorflow import global_variables, movement, reductions
from ringjax.tensorflow.compression import Compression
from ringjax.tensorflow.gradients import GradientSettings, reduce_gradients
from ringjax.tensorflow.mpi_ops import size_op
from ringjax.tensorflow.variables import unwrap_variable
from ringjax.world.process_set import ProcessSet


class TensorFlowBackend(Backend):
    """Reductions as operations of TensorFlow."""

    name = "tensorflow"
    compression = Compression

    def reduce(
        self,
        gradients: Sequence[Any],
        places: Sequence[int],
        variables: Sequence[Any],
        groups: Sequence[Sequence[int]],
        how: ReductionOptions,
    ) -> list[Any]:
        """See the base class."""
        settings = GradientSettings(
            name=how.name,
            compression=_own(how.compression),
            sparse_as_dense=how.sparse_as_dense,
            op=how.op,
            gradient_predivide_factor=how.predivide,
            process_set=how.process_set,
        )
        return reduce_gradients(gradients, groups, settings, variables)

    @property
    def xla_obstacle(self) -> str:
        """See the base class."""
        return "on a GPU" if tf.config.list_physical_devices("GPU") else ""

    def all_true(self, flag: Any, process_set: ProcessSet) -> Any:
        """See the base class."""
        votes = tf.cast(flag, tf.float32)
        return reductions.allreduce(votes, op=Min, process_set=process_set) > 0

    def size(self, process_set: ProcessSet) -> Any:
        """See the base class; a graph outlives changes of the ranks."""
        return size_op(process_set.process_set_id or 0)

    def is_sparse(self, gradient: Any) -> bool:
        """See the base class."""
        return isinstance(gradient, tf.IndexedSlices)

    def to_dense(self, gradient: Any) -> Any:
        """See the base class."""
        return tf.convert_to_tensor(gradient) if self.is_sparse(gradient) else gradient

    def compute_gradients(
        self, loss: Any, variables: Sequence[Any], grad_loss: Any, tape: Any
    ) -> list[Any]:
        """See the base class.

        Args:
            loss: a function, or a tensor that `tape` has recorded.
            variables: what to differentiate by, of Keras or TensorFlow.
            grad_loss: the gradient of the loss; None: 1.
            tape: a `tf.GradientTape`; None where the loss is a function.
        """
        held = [unwrap_variable(variable) for variable in variables]
        if callable(loss):
            with tf.GradientTape() as tape:
                tape.watch(held)
                loss = loss()
        elif tape is None:
            raise ValueError("`tape` is required when a tensor is given as `loss`")
        return list(tape.gradient(loss, held, grad_loss))

    # -- values ------------------------------------------------------------------------

    def allreduce(
        self,
        value: Any,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        compression: Any,
    ) -> Any:
        """See the base class."""
        return reductions.allreduce(
            tf.convert_to_tensor(value),
            op=op,
            name=name,
            prescale_factor=prescale,
            postscale_factor=postscale,
            compression=_own(compression),
        )

    def allgather(self, value: Any, name: str | None) -> Any:
        """See the base class."""
        return movement.allgather(tf.convert_to_tensor(value), name=name)

    def broadcast(self, value: Any, root_rank: int, name: str | None) -> Any:
        """See the base class."""
        return movement.broadcast(tf.convert_to_tensor(value), root_rank, name=name)

    def reducescatter(self, value: Any, name: str | None, op: ReduceOp) -> Any:
        """See the base class."""
        return reductions.reducescatter(tf.convert_to_tensor(value), op=op, name=name)

    def broadcast_global_variables(self, root_rank: int) -> Any:
        """See the base class; in graphs of TensorFlow 1 there is such a list."""
        return global_variables.broadcast_global_variables(root_rank)


def _own(compression: Any) -> Any:
    if isinstance(compression, WireDtype):
        return getattr(Compression, compression.name)
    return compression


BACKEND = TensorFlowBackend()
