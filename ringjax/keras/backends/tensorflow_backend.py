"""TensorFlowBackend: reduces gradients with operations of `ringjax.tensorflow`.

The operations work in train steps that Keras runs eagerly and in compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringjax.compression import WireDtype
from ringjax.keras.backends.base_backend import Backend, ReductionOptions
from ringjax.keras.keras_types import Compressor, Tensor, Variable
from ringjax.ops import Min, ReduceOp
from ringjax.tensorflow import functions, movement, reductions
from ringjax.tensorflow.compression import Compression
from ringjax.tensorflow.gradients import GradientSettings, reduce_gradients
from ringjax.tensorflow.mpi_ops import size_op
from ringjax.tensorflow.variables import unwrap_variable
from ringjax.world.process_set import ProcessSet


class _TensorFlowBackend(Backend):
    name = "tensorflow"
    compression = Compression

    def reduce(
        self,
        gradients: Sequence[Tensor],
        indices: Sequence[int],
        variables: Sequence[Variable],
        groups: Sequence[Sequence[int]],
        options: ReductionOptions,
    ) -> list[Tensor]:
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
        return "on a GPU" if tf.config.list_physical_devices("GPU") else ""

    def all_true(self, flag: Tensor, process_set: ProcessSet) -> Tensor:
        votes = tf.cast(flag, tf.float32)
        return reductions.allreduce(votes, op=Min, process_set=process_set) > 0

    def size(self, process_set: ProcessSet) -> Tensor:
        """Returns a graph operation, because the size may change after the tracing."""
        return size_op(process_set.process_set_id or 0)

    def is_sparse(self, gradient: Tensor) -> bool:
        return isinstance(gradient, tf.IndexedSlices)

    def to_dense(self, gradient: Tensor) -> Tensor:
        return tf.convert_to_tensor(gradient) if self.is_sparse(gradient) else gradient

    def compute_gradients(
        self,
        loss: Tensor | Callable[[], Tensor],
        variables: Sequence[Variable],
        grad_loss: Tensor | None,
        tape: Any,
    ) -> list[Tensor]:
        """Returns the gradients of a loss.

        Args:
            loss: a function, or a tensor that `tape` has recorded.
            variables: variables of Keras or TensorFlow.
            grad_loss: the gradient of the loss; None means 1.
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

    # -- values, outside of compiled steps ---------------------------------------------

    def allreduce(
        self,
        value: Tensor,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        compression: Compressor,
    ) -> Tensor:
        return reductions.allreduce(
            tf.convert_to_tensor(value),
            op=op,
            name=name,
            prescale_factor=prescale,
            postscale_factor=postscale,
            compression=_tensorflow_compressor(compression),
        )

    def allgather(self, value: Tensor, name: str | None) -> Tensor:
        return movement.allgather(tf.convert_to_tensor(value), name=name)

    def broadcast(self, value: Tensor, root_rank: int, name: str | None) -> Tensor:
        return movement.broadcast(tf.convert_to_tensor(value), root_rank, name=name)

    def reducescatter(self, value: Tensor, name: str | None, op: ReduceOp) -> Tensor:
        return reductions.reducescatter(tf.convert_to_tensor(value), op=op, name=name)

    def broadcast_global_variables(self, root_rank: int) -> object:
        """Broadcasts in graphs of TensorFlow 1, which have a list of all variables."""
        return functions.broadcast_global_variables(root_rank)


def _tensorflow_compressor(compression: Compressor) -> Compressor:
    if isinstance(compression, WireDtype):
        return getattr(Compression, compression.name)
    return compression


BACKEND = _TensorFlowBackend()
