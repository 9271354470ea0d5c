"""The interface of a backend, with the parts that all of them share.

What a program calls by itself (`allreduce` and the like on values, the broadcast of
variables) goes through the memory of the host and `ringjax.eager`, unless a backend
knows better. Reductions of gradients are each backend's own.
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
from ringjax.ops import Average, ReduceOp
from ringjax.world.process_set import ProcessSet


@dataclasses.dataclass(frozen=True)
class ReductionOptions:
    """How gradients are reduced.

    Attributes:
        name: stands for the gradients on all ranks; with a number, for one of them.
        op: Average, Sum or Adasum.
        compression: a compression of the backend, or a `WireDtype`.
        predivide: as `gradient_predivide_factor`.
        process_set: the ranks that take part; this rank is one of them.
        sparse_as_dense: sparse gradients become dense ones before they travel.
    """

    name: str
    op: ReduceOp
    compression: Any
    predivide: float
    process_set: ProcessSet
    sparse_as_dense: bool

    @property
    def factors(self) -> tuple[float, float]:
        """Before and after the sum; the core divides an average by the size."""
        if self.op != Average:
            return 1.0, 1.0
        return 1.0 / self.predivide, self.predivide


class Backend(abc.ABC):
    """What differs between Keras' backends.

    Attributes:
        name: as `keras.backend.backend()` says it.
        compression: the class with `none`, `fp16` and `bf16` for the backend's tensors.
    """

    name: str
    compression: Any = Compression

    @property
    def xla_obstacle(self) -> str:
        """Where XLA cannot compile the exchange of gradients; empty: it can."""
        return ""

    @abc.abstractmethod
    def reduce(
        self,
        gradients: Sequence[Any],
        places: Sequence[int],
        variables: Sequence[Any],
        groups: Sequence[Sequence[int]],
        how: ReductionOptions,
    ) -> list[Any]:
        """The gradients, reduced over the ranks.

        Args:
            gradients: tensors of the backend, traced ones included; none is None.
            places: a number for each, by which all ranks know it.
            variables: of Keras, whose gradients these are. In some steps there is a
                look whether all ranks have the same, and a warning if not.
            groups: indices of gradients that are one operation; others are free.
            how: what is done to them.
        """

    @abc.abstractmethod
    def all_true(self, flag: Any, process_set: ProcessSet) -> Any:
        """Whether a boolean tensor is true on all ranks of a set."""

    def cond(
        self,
        condition: Any,
        yes: Callable[[], None],
        no: Callable[[], None],
        variables: Sequence[Any],
    ) -> None:
        """Calls one of two functions, which read and change no other `variables`."""
        keras.ops.cond(condition, yes, no)

    def change_on_update(
        self,
        condition: Any,
        change: Callable[[list[Any]], list[Any]],
        values: list[Any],
    ) -> list[Any]:
        """Changes values where Keras' accumulation of gradients makes an update.

        Called where Keras clips gradients, which most backends do then only.
        """
        return change(values)

    def size(self, process_set: ProcessSet) -> Any:
        """How many ranks there are when the step runs, as a factor."""
        return float(process_set.size())

    def is_sparse(self, gradient: Any) -> bool:
        """Whether a gradient is no plain tensor."""
        return False

    def to_dense(self, gradient: Any) -> Any:
        """A sparse gradient as a plain tensor."""
        return gradient

    # -- values, outside of compiled steps ---------------------------------------------

    def allreduce(
        self,
        value: Any,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        compression: Any,
    ) -> Any:
        """The reduction of all ranks' values."""
        array = self.to_host(value)
        sent = _narrowed(array, compression)
        out = eager.allreduce(
            sent, op, name=name, prescale_factor=prescale, postscale_factor=postscale
        )
        return self.to_tensor(out.astype(array.dtype))

    def allgather(self, value: Any, name: str | None) -> Any:
        """All ranks' rows, one after the other."""
        return self.to_tensor(eager.allgather(self.to_host(value), name=name))

    def broadcast(self, value: Any, root_rank: int, name: str | None) -> Any:
        """The root's value."""
        return self.to_tensor(
            eager.broadcast(self.to_host(value), root_rank, name=name)
        )

    def reducescatter(self, value: Any, name: str | None, op: ReduceOp) -> Any:
        """This rank's rows of the reduction."""
        return self.to_tensor(eager.reducescatter(self.to_host(value), op, name=name))

    def to_host(self, value: Any) -> np.ndarray[Any, Any]:
        """A value as the backend would hold it, in the memory of this host."""
        found: np.ndarray[Any, Any] = keras.ops.convert_to_numpy(
            keras.ops.convert_to_tensor(value)
        )
        return found

    def to_tensor(self, array: np.ndarray[Any, Any]) -> Any:
        """An array as a tensor of the backend."""
        return keras.ops.convert_to_tensor(array)

    def broadcast_global_variables(self, root_rank: int) -> Any:
        """What `ringjax.keras.broadcast_global_variables` does."""
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution: Keras "
            "keeps no list of all variables. Put BroadcastGlobalVariablesCallback"
            f"({root_rank}) into model.fit, or broadcast the variables of your model."
        )

    def compute_gradients(
        self, loss: Any, variables: Sequence[Any], grad_loss: Any, tape: Any
    ) -> list[Any]:
        """The gradients of a loss, as Keras 2's optimizers computed them."""
        raise AttributeError(
            f"Keras' optimizers compute no gradients on the backend {self.name!r}; "
            "give gradients to `apply`"
        )

    def broadcast_variables(self, variables: Sequence[Any], root_rank: int) -> None:
        """Sets variables to the root's values."""
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


def wire_dtype(compression: Any) -> WireDtype | None:
    """The `WireDtype` of a compression, or None if it is a program's own.

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
    home = str(getattr(compression, "__module__", ""))
    ours = home.startswith("ringjax.")
    return known.get(getattr(compression, "__name__", "")) if ours else None


def _narrowed(array: np.ndarray[Any, Any], compression: Any) -> Any:
    wire = wire_dtype(compression)
    if wire is None:
        raise TypeError(
            f"ringjax.keras: compression={compression!r}, expected Compression.none, "
            ".fp16 or .bf16"
        )
    if wire.wire is None or array.dtype not in (np.float32, np.float64):
        return array
    return array.astype("float16" if wire is Compression.fp16 else _bfloat16())


def _bfloat16() -> Any:
    from ml_dtypes import bfloat16

    return bfloat16
