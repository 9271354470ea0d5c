"""SyncBatchNorm: batch normalization over the batches of all ranks, on CPU and CUDA.

References:
    S. Ioffe, C. Szegedy, Batch Normalization, ICML 2015. T. Chan, G. Golub, R. LeVeque,
    Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    This layer combines the means and variances of the ranks by these formulae, because
    a difference of sums of squares would lose digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.modules.batchnorm import _BatchNorm

from ringjax import runtime
from ringjax.ops import Sum
from ringjax.torch.movement import allgather
from ringjax.torch.reductions import allreduce


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, `2d` or `3d` over the batches of all ranks together.

    All ranks must call their layers in the same order. Their batches may differ in
    size. With one rank the layer is an ordinary batch normalization. The gradients of
    weight and bias are those of this rank's batch; `DistributedOptimizer` reduces them
    like other gradients.

    Args:
        num_features: the number of channels, dimension 1 of the input.
        eps: a number that is added to the variance.
        momentum: the weight of a new batch in the running statistics. If it is None,
            the running statistics are the average over all batches.
        affine: whether the layer has a weight and a bias.
        track_running_stats: whether the layer keeps running statistics.

    Raises:
        ValueError: raised by a call: the input has less than 2 dimensions, or all ranks
            together have one value per channel.

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
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or runtime.size() == 1:
            return super().forward(input)
        running: _RunningStatistics | None = None
        if self.training and self.running_mean is not None:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            momentum = self.momentum
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
            running = _RunningStatistics(self.running_mean, self.running_var, momentum)
        inputs = (input, self.weight, self.bias, self.eps, running)
        result: Tensor = _SyncBatchNorm.apply(*inputs)  # type: ignore[no-untyped-call]
        return result


class _RunningStatistics(NamedTuple):
    mean: Tensor
    var: Tensor
    momentum: float


class _Context(FunctionCtx):
    count: int
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        running: _RunningStatistics | None,
    ) -> Tensor:
        mean, var, count = _moments(x)
        if count < 2:
            raise ValueError(
                "expected more than 1 value per channel when training, got input size "
                f"{list(x.shape)} on every rank"
            )
        if running is not None:
            unbiased = var * (count / (count - 1))
            for tracked, new in ((running.mean, mean), (running.var, unbiased)):
                tracked.lerp_(new.to(tracked.dtype), running.momentum)
        invstd = torch.rsqrt(var + eps)
        saved = (x, mean, invstd) if weight is None else (x, mean, invstd, weight)
        ctx.save_for_backward(*saved)
        ctx.count = count
        scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
        shift = -mean * scale
        if bias is not None:
            shift = shift + bias.to(shift.dtype)
        wide = x.to(mean.dtype)
        return torch.addcmul(_along(shift, x), wide, _along(scale, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, invstd, *affine = ctx.saved_tensors
        weight = affine[0] if affine else None
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
        grad_weight = None
        if needs_weight and weight is not None:
            grad_weight = sums[1].to(weight.dtype)
        grad_bias = sums[0] if needs_bias else None
        if grad_bias is not None and weight is not None:
            grad_bias = grad_bias.to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None


def _axes(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """Reshapes one value per channel, so that the values broadcast against `x`."""
    return channels.view(1, -1, *[1] * (x.dim() - 2))


def _moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Returns mean, variance and number of values of a channel, over all ranks."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = x.numel() // x.size(1) if x.size(1) else 0
    if count:
        var, mean = torch.var_mean(wide, _axes(x), correction=0)
    else:
        var = mean = wide.new_zeros(x.size(1))
    # Count in float64, because float32 represents counts above 2**24 inexactly.
    local = torch.cat([mean.new_tensor([count]), mean, var]).double()
    moments = allgather(local[None], name="sync_batch_norm.forward")
    counts, means, variances = moments.tensor_split([1, 1 + x.size(1)], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    var = (counts * (variances + (means - mean).square())).sum(0) / total
    return mean.to(wide.dtype), var.to(wide.dtype), int(total)
