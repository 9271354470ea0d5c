"""TensorFlowBackend: reduces by the operations of `ringjax.tensorflow`.

The operations work in train steps that Keras runs eagerly and in compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringjax.compression import WireDtype
from ringjax.keras.backends.base_backend import Backend, ReductionOptions
from ringjax.keras.keras_types import BackendTensor, Compressor, KerasVariable
from ringjax.ops import Min, ReduceOp
from ringjax.tensorflow import global_variables, movement, reductions
from ringjax.tensorflow.compression import Compression
from ringjax.tensorflow.gradients import GradientSettings, reduce_gradients
from ringjax.tensorflow.mpi_ops import size_op
from ringjax.tensorflow.variables import unwrap_variable
from ringjax.world.process_set import ProcessSet


class TensorFlowBackend(Backend):
    """Reduces by operations of TensorFlow."""

    name = "tensorflow"
    compression = Compression

    def reduce(
        self,
        gradients: Sequence[BackendTensor],
        indices: Sequence[int],
        variables: Sequence[KerasVariable],
        groups: Sequence[Sequence[int]],
        options: ReductionOptions,
    ) -> list[BackendTensor]:
        """Reduces as `ringjax.tensorflow` does for tapes and optimizers."""
        settings = GradientSettings(
            name=options.name,
            compression=_tensorflow_compressor(options.compression),
            sparse_as_dense=options.sparse_as_dense,
            op=options.op,
            gradient_predivide_factor=options.predivide,
            process_set=options.process_set,
        )
        return reduce_gradients(gradients, groups, settings, variables)

    @property
    def xla_obstacle(self) -> str:
        """XLA cannot compile the reduction on a GPU."""
        return "on a GPU" if tf.config.list_physical_devices("GPU") else ""

    def all_true(self, flag: BackendTensor, process_set: ProcessSet) -> BackendTensor:
        """Computes the minimum of the flags of all ranks."""
        votes = tf.cast(flag, tf.float32)
        return reductions.allreduce(votes, op=Min, process_set=process_set) > 0

    def size(self, process_set: ProcessSet) -> BackendTensor:
        """Returns an operation, because a graph outlives changes of the ranks."""
        return size_op(process_set.process_set_id or 0)

    def is_sparse(self, gradient: BackendTensor) -> bool:
        """Whether a gradient is a `tf.IndexedSlices`."""
        return isinstance(gradient, tf.IndexedSlices)

    def to_dense(self, gradient: BackendTensor) -> BackendTensor:
        """Returns a gradient as a `tf.Tensor`."""
        return tf.convert_to_tensor(gradient) if self.is_sparse(gradient) else gradient

    def compute_gradients(
        self,
        loss: BackendTensor | Callable[[], BackendTensor],
        variables: Sequence[KerasVariable],
        grad_loss: BackendTensor | None,
        tape: Any,
    ) -> list[BackendTensor]:
        """Returns the gradients of a loss.

        Args:
            loss: a function, or a tensor that `tape` has recorded.
            variables: variables of Keras or TensorFlow.
            grad_loss: the gradient of the loss; None: 1.
            tape: a `tf.GradientTape`; None if the loss is a function.
        """
        sources = [unwrap_variable(variable) for variable in variables]
        if callable(loss):
            with tf.GradientTape() as tape:
                tape.watch(sources)
                loss = loss()
        elif tape is None:
            raise ValueError("`tape` is required when a tensor is given as `loss`")
        return list(tape.gradient(loss, sources, grad_loss))

    # -- values ------------------------------------------------------------------------

    def allreduce(
        self,
        value: BackendTensor,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        compression: Compressor,
    ) -> BackendTensor:
        """Returns the reduction of the values of all ranks."""
        return reductions.allreduce(
            tf.convert_to_tensor(value),
            op=op,
            name=name,
            prescale_factor=prescale,
            postscale_factor=postscale,
            compression=_tensorflow_compressor(compression),
        )

    def allgather(self, value: BackendTensor, name: str | None) -> BackendTensor:
        """Returns the rows of all ranks, in the order of the ranks."""
        return movement.allgather(tf.convert_to_tensor(value), name=name)

    def broadcast(
        self, value: BackendTensor, root_rank: int, name: str | None
    ) -> BackendTensor:
        """Returns the value of the root."""
        return movement.broadcast(tf.convert_to_tensor(value), root_rank, name=name)

    def reducescatter(
        self, value: BackendTensor, name: str | None, op: ReduceOp
    ) -> BackendTensor:
        """Returns this rank's rows of the reduction."""
        return reductions.reducescatter(tf.convert_to_tensor(value), op=op, name=name)

    def broadcast_global_variables(self, root_rank: int) -> object:
        """Works in graphs of TensorFlow 1, which have a list of all variables."""
        return global_variables.broadcast_global_variables(root_rank)


def _tensorflow_compressor(compression: Compressor) -> Compressor:
    if isinstance(compression, WireDtype):
        return getattr(Compression, compression.name)
    return compression


BACKEND = TensorFlowBackend()
