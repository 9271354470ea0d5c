"""Batch normalization with the statistics of all ranks' batches, on CPU and CUDA.

S. Ioffe, C. Szegedy, Batch Normalization, ICML 2015. Means and squared deviations of
the ranks are combined as in T. Chan, G. Golub, R. LeVeque, Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances, 1979: nothing cancels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ringjax import runtime
from ringjax.ops import Sum
from ringjax.torch.movement import allgather
from ringjax.torch.reductions import allreduce


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, `2d` or `3d` over the batches of all ranks together.

    All ranks must call it, in the same order; their batches may differ in size. With
    one rank it is the ordinary batch normalization. The gradients of weight and bias
    are this rank's part; `DistributedOptimizer` adds them up as all others.

    Args:
        num_features: channels, dimension 1 of the input.
        eps: is added to the variance.
        momentum: weight of the new batch in the running statistics; None averages all.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics.

    Raises:
        ValueError: when called: less than 2 dimensions, or one value per channel.

    Example:
        >>> import torch, ringjax.torch as hvd
        >>> hvd.init()
        >>> hvd.SyncBatchNorm(3)(torch.rand(4, 3)).shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes `input`, of shape (N, C, ...)."""
        self._check_input_dim(input)
        learns = self.training or self.running_mean is None
        if not learns or runtime.size() == 1:
            return super().forward(input)
        weight: float | None = None
        running: tuple[Tensor, Tensor] | None = None
        if self.training and self.running_mean is not None:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            running = (self.running_mean, self.running_var)
            weight = self.momentum
            if weight is None:
                weight = 1.0 / float(self.num_batches_tracked)
        call = (input, self.weight, self.bias, running, self.eps, weight)
        result: Tensor = _SyncBatchNorm.apply(*call)  # type: ignore[no-untyped-call]
        return result


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor, Tensor] | None,
        eps: float,
        momentum: float,
    ) -> Tensor:
        mean, var, count = _moments(x)
        if count < 2:
            raise ValueError(
                "expected more than 1 value per channel when training, got input size "
                f"{list(x.shape)} on every rank"
            )
        if running is not None:
            for tracked, new in zip(
                running, (mean, var * (count / (count - 1))), strict=True
            ):
                tracked.lerp_(new.to(tracked.dtype), momentum)
        invstd = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.count = count
        scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
        shift = -mean * scale
        if bias is not None:
            shift = shift + bias.to(shift.dtype)
        wide = x.to(mean.dtype)
        return torch.addcmul(_along(shift, x), wide, _along(scale, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = gradients[0].to(mean.dtype)
        normal = (x.to(mean.dtype) - _along(mean, x)) * _along(invstd, x)
        axes = _axes(x)
        sums = torch.stack([dy.sum(axes), (dy * normal).sum(axes)])
        grad_x = None
        if needs_x:
            name = "sync_batch_norm.backward"
            total = allreduce(sums, name=name, op=Sum) / ctx.count
            scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
            centred = dy - _along(total[0], x) - normal * _along(total[1], x)
            grad_x = (centred * _along(scale, x)).to(x.dtype)
        grad_weight = sums[1].to(weight.dtype) if needs_weight else None
        grad_bias = sums[0] if needs_bias else None
        if grad_bias is not None and weight is not None:
            grad_bias = grad_bias.to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _axes(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """One number for each channel, as it goes with `x`."""
    return channels.view(1, -1, *[1] * (x.dim() - 2))


def _moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean, variance and number of values in a channel, over all ranks."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = x.numel() // x.size(1) if x.size(1) else 0
    if count:
        var, mean = torch.var_mean(wide, _axes(x), correction=0)
    else:
        var = mean = wide.new_zeros(x.size(1))
    # In float64: counts must be exact.
    mine = torch.cat([mean.new_tensor([count]), mean, var]).double()
    name = "sync_batch_norm.forward"
    every: Tensor = allgather(mine[None], name=name)
    counts, means, vars = every.tensor_split([1, 1 + x.size(1)], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    var = (counts * (vars + (means - mean).square())).sum(0) / total
    return mean.to(wide.dtype), var.to(wide.dtype), int(total)
