"""Gradients in flight: one named operation that reduces one or several gradients.

`submit_gradients` starts the operation. `InFlightReduction.receive` waits for the
operation and stores the results. reducer.py decides when to call these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ringjax.errors import RingjaxError
from ringjax.ops import Average, ReduceOp
from ringjax.torch import mpi_ops
from ringjax.torch.compression import Compressor
from ringjax.world.process_set import ProcessSet


@dataclass
class AllreduceOptions:
    """The arguments of `DistributedOptimizer` that say how gradients are reduced."""

    compression: type[Compressor]
    backward_passes_per_step: int
    op: ReduceOp
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet


class InFlightGradient(NamedTuple):
    """A gradient at the time of its submission.

    Attributes:
        parameter: the parameter that has the gradient.
        gradient: `parameter.grad` at that time.
        version: PyTorch's counter of in-place changes of `gradient` at that time.
        context: what the compression needs to decompress the result.
    """

    parameter: Tensor
    gradient: Tensor
    version: int
    context: torch.dtype | None

    def is_changed(self) -> bool:
        """Returns whether the program has changed or replaced the gradient."""
        gradient = self.gradient
        return self.parameter.grad is not gradient or gradient._version != self.version


class InFlightReduction(NamedTuple):
    """A submitted operation: the function that waits for it, and its gradients."""

    wait: Callable[[], Sequence[Tensor]]
    sent: list[InFlightGradient]

    def receive(self, compression: type[Compressor]) -> None:
        """Waits for the operation and stores the reduced gradients in `.grad`."""
        outputs = self.wait()
        for (p, gradient, _, context), output in zip(self.sent, outputs, strict=True):
            if p.grad is None:
                continue
            output = compression.decompress(output, context)
            if not gradient.is_sparse:
                if output is not p.grad:
                    p.grad.copy_(output)
            elif output.is_sparse:
                p.grad = output
            else:
                p.grad = output.to_sparse(gradient.sparse_dim())


def submit_gradients(
    unit: Sequence[Tensor],
    gradients: Sequence[Tensor],
    name: str,
    options: AllreduceOptions,
) -> InFlightReduction:
    """Submits the gradients of the parameters in `unit` as one operation."""
    call: dict[str, Any] = {"name": name, "op": options.op}
    call["process_set"] = options.process_set
    if gradients[0].is_sparse and len(unit) == 1 and not options.sparse_as_dense:
        wait = mpi_ops.sparse_allreduce_async(gradients[0], **call)
        alone = InFlightGradient(unit[0], gradients[0], gradients[0]._version, None)
        return InFlightReduction(lambda: [wait()], [alone])
    sent, packed = [], []
    for p, gradient in zip(unit, gradients, strict=True):
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        tensor, context = options.compression.compress(dense)
        packed.append(tensor)
        sent.append(InFlightGradient(p, gradient, gradient._version, context))
    # Apply only `gradient_predivide_factor`: the core divides by the size.
    if options.op == Average:
        call["prescale_factor"] = 1.0 / options.gradient_predivide_factor
        call["postscale_factor"] = options.gradient_predivide_factor
    if len(unit) == 1:
        single = mpi_ops.allreduce_async_(packed[0], **call)
        return InFlightReduction(lambda: [mpi_ops.synchronize(single)], sent)
    grouped = mpi_ops.grouped_allreduce_async_(packed, **call)
    return InFlightReduction(lambda: mpi_ops.synchronize(grouped), sent)


def failed_reduction(error: RingjaxError) -> InFlightReduction:
    """Returns a reduction without gradients, whose `wait` raises `error`."""
    return InFlightReduction(partial(_raise, error), [])


def _raise(error: RingjaxError) -> NoReturn:
    raise error
