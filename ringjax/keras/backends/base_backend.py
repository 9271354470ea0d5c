"""Backend: the interface of a backend, and the parts that all backends share.

Each backend reduces gradients in its own way. Operations outside of train steps
(`allreduce` of a value, the broadcast of variables) copy values to the host and use
`ringjax.eager`, unless a backend overrides them.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from ringjax import eager
from ringjax.compression import Compression, WireDtype
from ringjax.keras.keras_types import Compressor, Tensor, TensorChange, Variable
from ringjax.ops import Average, ReduceOp
from ringjax.world.process_set import ProcessSet

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class ReductionOptions:
    """The options of a reduction of gradients.

    Attributes:
        name: the name of the reduction on all ranks. The name of the operation on one
            gradient consists of this name and a number.
        predivide: the argument `gradient_predivide_factor`.
        process_set: the ranks that take part; this rank is one of them.
    """

    name: str
    op: ReduceOp
    compression: Compressor
    predivide: float
    process_set: ProcessSet
    sparse_as_dense: bool

    @property
    def factors(self) -> tuple[float, float]:
        """The factors before and after the sum; Average also divides by the size."""
        if self.op != Average:
            return 1.0, 1.0
        return 1.0 / self.predivide, self.predivide


class Backend(abc.ABC):
    """The parts of `ringjax.keras` that differ between the backends of Keras.

    Attributes:
        name: the result of `keras.backend.backend()`.
        compression: the class with `none`, `fp16` and `bf16` for the backend's tensors.
    """

    name: str
    compression: Any = Compression

    @property
    def xla_obstacle(self) -> str:
        """The place in which XLA cannot compile the reduction, or an empty string."""
        return ""

    @abc.abstractmethod
    def reduce(
        self,
        gradients: Sequence[Tensor],
        indices: Sequence[int],
        variables: Sequence[Variable],
        groups: Sequence[Sequence[int]],
        options: ReductionOptions,
    ) -> list[Tensor]:
        """Returns the gradients, reduced over the ranks.

        In some steps the variables of the ranks are compared, with a warning if they
        differ.

        Args:
            gradients: tensors of the backend, without None.
            indices: an index for each gradient, which is the same on all ranks.
            variables: the variables to which the gradients belong.
            groups: lists of positions in `gradients`; one operation reduces a list. The
                backend groups all other gradients as it chooses.
            options: how the gradients are reduced.
        """

    @abc.abstractmethod
    def all_true(self, flag: Tensor, process_set: ProcessSet) -> Tensor:
        """Returns whether a boolean tensor is true on all ranks of a process set."""

    def cond(
        self,
        condition: Tensor,
        true_fn: Callable[[], None],
        false_fn: Callable[[], None],
        variables: Sequence[Variable],
    ) -> None:
        """Calls `true_fn` or `false_fn`, which use only the given variables."""
        keras.ops.cond(condition, true_fn, false_fn)

    def change_on_update(
        self, condition: Tensor, change: TensorChange, values: list[Tensor]
    ) -> list[Tensor]:
        """Changes values in the steps in which Keras applies accumulated gradients.

        The caller is the method by which Keras clips gradients. On most backends Keras
        clips gradients in those steps only, so `condition` is not needed.
        """
        return change(values)

    def size(self, process_set: ProcessSet) -> Tensor:
        """Returns the number of ranks at the time at which the step runs."""
        return float(process_set.size())

    def is_sparse(self, gradient: Tensor) -> bool:
        """Returns whether a gradient is sparse, as `tf.IndexedSlices` are."""
        return False

    def to_dense(self, gradient: Tensor) -> Tensor:
        """Returns a gradient as a dense tensor."""
        return gradient

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
        """Returns the reduction of the values of all ranks."""
        array = self._to_host(value)
        sent = _compress(array, compression)
        out = eager.allreduce(
            sent, op, name=name, prescale_factor=prescale, postscale_factor=postscale
        )
        return keras.ops.convert_to_tensor(out.astype(array.dtype))

    def allgather(self, value: Tensor, name: str | None) -> Tensor:
        """Returns the rows of all ranks, in the order of the ranks."""
        out = eager.allgather(self._to_host(value), name=name)
        return keras.ops.convert_to_tensor(out)

    def broadcast(self, value: Tensor, root_rank: int, name: str | None) -> Tensor:
        """Returns the root's value on every rank."""
        out = eager.broadcast(self._to_host(value), root_rank, name=name)
        return keras.ops.convert_to_tensor(out)

    def reducescatter(self, value: Tensor, name: str | None, op: ReduceOp) -> Tensor:
        """Returns this rank's rows of the reduction."""
        out = eager.reducescatter(self._to_host(value), op, name=name)
        return keras.ops.convert_to_tensor(out)

    def _to_host(self, value: Tensor) -> Array:
        # Make a tensor first, so that the array has the dtype that the backend chooses.
        tensor = keras.ops.convert_to_tensor(value)
        array: Array = keras.ops.convert_to_numpy(tensor)
        return array

    def broadcast_global_variables(self, root_rank: int) -> object:
        """Implements `ringjax.keras.broadcast_global_variables`."""
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution: Keras "
            "keeps no list of all variables. Put BroadcastGlobalVariablesCallback"
            f"({root_rank}) into model.fit, or broadcast the variables of your model."
        )

    def compute_gradients(
        self,
        loss: Tensor | Callable[[], Tensor],
        variables: Sequence[Variable],
        grad_loss: Tensor | None,
        tape: Any,
    ) -> list[Tensor]:
        """Returns the gradients of a loss, as the optimizers of Keras 2 did."""
        raise AttributeError(
            f"Keras' optimizers compute no gradients on the backend {self.name!r}; "
            "give gradients to `apply`"
        )

    def broadcast_variables(
        self, variables: Sequence[Variable], root_rank: int
    ) -> None:
        """Sets variables to the values of the root."""
        handles = [
            eager.broadcast_async(
                keras.ops.convert_to_numpy(getattr(variable, "value", variable)),
                root_rank,
                name=f"broadcast_variables.{i}",
            )
            for i, variable in enumerate(variables)
        ]
        for variable, handle in zip(variables, handles, strict=True):
            variable.assign(eager.synchronize(handle))


def wire_dtype(compression: Compressor) -> WireDtype | None:
    """Returns the `WireDtype` of a compression, or None for a program's own class.

    Example:
        >>> wire_dtype(Compression.bf16)
        Compression.bf16
    """
    if isinstance(compression, WireDtype):
        return compression
    known = {
        "NoneCompressor": Compression.none,
        "FP16Compressor": Compression.fp16,
        "BF16Compressor": Compression.bf16,
    }
    if not str(getattr(compression, "__module__", "")).startswith("ringjax."):
        return None
    return known.get(getattr(compression, "__name__", ""))


def _compress(array: Array, compression: Compressor) -> Array:
    wire = wire_dtype(compression)
    if wire is None:
        raise TypeError(
            f"ringjax.keras: compression={compression!r}, expected Compression.none, "
            ".fp16 or .bf16"
        )
    if wire.wire is None or array.dtype not in (np.float32, np.float64):
        return array
    if wire is Compression.fp16:
        return array.astype(np.float16)
    from ml_dtypes import bfloat16

    return array.astype(bfloat16)
