"""One autograd function for all collectives: what runs forward brings its rule back.

The rules themselves stand beside the operations in operations.py, those of broadcast
and alltoall in movement.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# From the gradients of the outputs to those of the inputs.
Backward = Callable[[Sequence[Tensor]], Sequence[Tensor]]
# From the inputs to the outputs and their rule.
Forward = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Backward]]


def needs_graph(tensors: Sequence[Tensor]) -> bool:
    """Whether one of them is part of the graph, or a leaf of it."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if getattr(tensor, "requires_grad", False):
                return True
    return False


def apply_function(run: Forward, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of `run`, as part of the graph if an input is."""
    if needs_graph(tensors):
        outputs = _AutogradFunction.apply(run, *tensors)  # type: ignore[no-untyped-call]
        return tuple(outputs)
    return tuple(run(tensors)[0])


class _AutogradFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Forward, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, ctx.rule = run(tensors)
        counts = [out for out in outputs if not out.dtype.is_floating_point]
        ctx.mark_non_differentiable(*(out for out in counts if not out.is_complex()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.rule(gradients))
