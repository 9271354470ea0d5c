"""Makes collectives differentiable: one autograd function serves all of them.

Each collective passes its own backward function; see operations.py and movement.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

# A function that computes the gradients of the inputs from the gradients of the
# outputs.
Backward = Callable[[Sequence[Tensor]], Sequence[Tensor]]
# A function that runs a collective on the inputs, and returns the outputs and their
# backward function.
Forward = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Backward]]


def needs_graph(tensors: Sequence[Tensor]) -> bool:
    """Returns whether autograd has to record an operation on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if getattr(tensor, "requires_grad", False):
                return True
    return False


def apply_function(run: Forward, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Runs a collective, and records it for autograd if an input needs gradients."""
    if needs_graph(tensors):
        outputs = _AutogradFunction.apply(run, *tensors)  # type: ignore[no-untyped-call]
        return tuple(outputs)
    return tuple(run(tensors)[0])


class _Context(FunctionCtx):
    run_backward: Backward


class _AutogradFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, run: Forward, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, ctx.run_backward = run(tensors)
        integers = [
            out
            for out in outputs
            if not out.dtype.is_floating_point and not out.is_complex()
        ]
        ctx.mark_non_differentiable(*integers)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.run_backward(gradients))
