"""Derivatives of the operations of ringjax.torch, which are those of Horovod."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringjax.torch as hvd

# Three ranks run all code of this layer. Tests that need other numbers have a marker.
pytestmark = [pytest.mark.ranks(3), pytest.mark.launch("torch")]


def gradient(run: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of ``(run(x) * weight).sum()``, where x is not a leaf."""
    leaf = x.clone().requires_grad_()
    (run(leaf * 1) * weight).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


def weights(size: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns the gradients of the results, one for each rank."""
    count = torch.Size(shape).numel()
    base = torch.arange(1.0, count + 1, dtype=torch.float64).view(shape)
    return [base + rank for rank in range(size)]


@pytest.mark.ranks(1, 2, 3)
def test_allreduce(world) -> None:
    x = torch.ones(3, 2, dtype=torch.float64)
    ws = weights(world.size, (3, 2))
    every = torch.stack(ws)
    w = ws[world.rank]
    close(gradient(hvd.allreduce, x, w), every.mean(0))
    close(gradient(lambda t: hvd.allreduce(t, op=hvd.Sum), x, w), every.sum(0))

    def scaled(t: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)

    close(gradient(scaled, x, w), 1.5 * every.sum(0))


def test_compressed(world) -> None:
    x, w = torch.ones(4), torch.full((4,), world.rank + 1.0)
    total = sum(r + 1.0 for r in range(world.size))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        got = gradient(
            lambda t, c=compression: hvd.allreduce(t, op=hvd.Sum, compression=c), x, w
        )
        torch.testing.assert_close(got, torch.full((4,), total))


def test_groups(world) -> None:
    ws = [weights(world.size, (2,)), weights(world.size, (3, 2))]
    xs = [torch.zeros_like(w[0]).requires_grad_() for w in ws]
    for run, scale in (
        (lambda: hvd.grouped_allreduce(xs), 1 / world.size),
        (lambda: hvd.grouped_allreduce(xs, op=hvd.Sum), 1.0),
    ):
        outs = run()
        sum((o * w[world.rank]).sum() for o, w in zip(outs, ws, strict=True)).backward()
        for x, w in zip(xs, ws, strict=True):
            close(x.grad, torch.stack(w).sum(0) * scale)
            x.grad = None
    # Here the loss uses only one of the results.
    outs = hvd.grouped_allreduce(xs, op=hvd.Sum)
    outs[1].sum().backward()
    close(xs[0].grad, torch.zeros_like(xs[0]))
    close(xs[1].grad, torch.full_like(xs[1], world.size))


def test_the_gradient_of_allgather(world) -> None:
    rows = [r + 1 for r in range(world.size)]
    ws = weights(world.size, (sum(rows), 2))
    x = torch.ones(rows[world.rank], 2, dtype=torch.float64)
    start = sum(rows[: world.rank])
    expected = torch.stack(ws).mean(0)[start : start + rows[world.rank]]
    close(gradient(hvd.allgather, x, ws[world.rank]), expected)

    def grouped(t: torch.Tensor) -> torch.Tensor:
        return hvd.grouped_allgather([t, t.detach()])[0]

    close(gradient(grouped, x, ws[world.rank]), expected)


def test_the_gradient_of_broadcast(world) -> None:
    ws = weights(world.size, (3,))
    for root in range(world.size):
        got = gradient(
            lambda t, r=root: hvd.broadcast(t, r),
            torch.ones(3).double(),
            ws[world.rank],
        )
        mean = torch.stack(ws).mean(0)
        close(got, mean if world.rank == root else torch.zeros(3).double())


def test_the_gradient_of_alltoall(world) -> None:
    rank, size = world.rank, world.size
    splits = [rank + q for q in range(size)]
    x = torch.ones(sum(splits), dtype=torch.float64)
    received = [r + rank for r in range(size)]
    # Each rank weights its results with its own number.
    w = torch.full((sum(received),), float(rank)).double()
    got = gradient(lambda t: hvd.alltoall(t, splits)[0], x, w)
    back = torch.cat([torch.full((n,), float(q)) for q, n in enumerate(splits)])
    close(got, back.double())
    x = torch.ones(2 * size, dtype=torch.float64)
    w = torch.full((2 * size,), float(rank)).double()
    close(
        gradient(hvd.alltoall, x, w), torch.arange(size).repeat_interleave(2).double()
    )
    out, counts = hvd.alltoall(x.requires_grad_(), [2] * size)
    assert out.requires_grad
    assert not counts.requires_grad


@pytest.mark.parametrize("grouped", [False, True])
def test_the_gradient_of_reducescatter(world, grouped: bool) -> None:
    rows = 2 * world.size + 1
    w = [weights(1, (rows, 2))[0] + r for r in range(world.size)]
    parts = [
        torch.tensor_split(w[r], world.size)[r] for r in range(world.size)
    ]  # each rank's weights
    x = torch.ones(rows, 2, dtype=torch.float64)

    def run(t: torch.Tensor, **call: Any) -> torch.Tensor:
        if grouped:
            return hvd.grouped_reducescatter([t], **call)[0]
        return hvd.reducescatter(t, **call)

    whole, mine = torch.cat(parts), parts[world.rank]
    close(gradient(run, x, mine), whole)
    close(gradient(lambda t: run(t, op=hvd.Sum), x, mine), world.size * whole)
    call = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    close(gradient(lambda t: run(t, **call), x, mine), 1.5 * whole)


def test_a_second_derivative(world) -> None:
    x = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)
    y = hvd.allreduce(x**2, op=hvd.Sum).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    close(first.detach(), torch.full((2,), 6.0 * world.size).double())
    (second,) = torch.autograd.grad(first.sum(), x)
    close(second, torch.full((2,), 2.0 * world.size).double())


def test_no_graph_without_requires_grad(world) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert not hvd.allreduce(x.detach()).requires_grad
    assert hvd.allreduce(x).requires_grad
