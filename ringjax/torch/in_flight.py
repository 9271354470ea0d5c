"""Gradients of one or several parameters under way, as one named operation.

How they are submitted and what becomes of their results; when, is in reducer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ringjax.errors import RingjaxError
from ringjax.ops import Average, ReduceOp
from ringjax.torch import mpi_ops
from ringjax.world.process_set import ProcessSet


@dataclass
class AllreduceOptions:
    """The arguments of `DistributedOptimizer` that say how gradients travel."""

    compression: Any
    backward_passes_per_step: int
    op: ReduceOp
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet


class InFlightGradient(NamedTuple):
    """A gradient that was submitted, as it was then."""

    parameter: Tensor
    gradient: Tensor
    version: int
    context: Any  # of the compression

    def is_changed(self) -> bool:
        """Whether somebody has changed or replaced it since."""
        gradient = self.gradient
        return self.parameter.grad is not gradient or gradient._version != self.version


class InFlightReduction(NamedTuple):
    """A submission: how to wait for it, and what became of its gradients."""

    wait: Callable[[], Any]
    sent: list[InFlightGradient]

    def receive(self, compression: Any) -> None:
        """Waits, and gives the parameters their reduced gradients.

        Raises:
            RingjaxError: it has failed.
        """
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
    how: AllreduceOptions,
) -> InFlightReduction:
    """Submits the gradients of these parameters as one operation.

    Raises:
        RingjaxError: it cannot be submitted.
    """
    options: dict[str, Any] = {"name": name, "op": how.op}
    options["process_set"] = how.process_set
    if gradients[0].is_sparse and len(unit) == 1 and not how.sparse_as_dense:
        handle = mpi_ops.sparse_allreduce_async(gradients[0], **options)
        alone = InFlightGradient(unit[0], gradients[0], gradients[0]._version, None)
        return InFlightReduction(lambda: [handle()], [alone])
    sent, packed = [], []
    for p, gradient in zip(unit, gradients, strict=True):
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        tensor, context = how.compression.compress(dense)
        packed.append(tensor)
        sent.append(InFlightGradient(p, gradient, gradient._version, context))
    if how.op == Average:  # the core divides by the size after the sum
        options["prescale_factor"] = 1.0 / how.gradient_predivide_factor
        options["postscale_factor"] = how.gradient_predivide_factor
    if len(unit) == 1:
        one = mpi_ops.allreduce_async_(packed[0], **options)
        return InFlightReduction(lambda: [mpi_ops.synchronize(one)], sent)
    group = mpi_ops.grouped_allreduce_async_(packed, **options)
    return InFlightReduction(lambda: mpi_ops.synchronize(group), sent)


def failed_reduction(error: RingjaxError) -> InFlightReduction:
    """Returns a flight whose `wait` raises `error`."""
    return InFlightReduction(partial(_fail, error), [])


def _fail(error: RingjaxError) -> Any:
    raise error
