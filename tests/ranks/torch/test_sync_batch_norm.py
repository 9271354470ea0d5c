"""SyncBatchNorm equals torch.nn.BatchNorm on the batches of all ranks together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.stacked import raises

import ringjax.torch as hvd

# Three ranks run all code that two ranks run. One test of each file runs on two, too.
pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.launch("torch")]

NORMS = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d,
         5: torch.nn.BatchNorm3d}  # fmt: skip


def batches(size: int, rest: tuple[int, ...], rows: list[int] | None = None) -> Any:
    generator = torch.Generator().manual_seed(7)
    counts = rows or [4] * size
    return [
        torch.randn(n, 3, *rest, dtype=torch.float64, generator=generator) * 2 + 100
        for n in counts
    ]


def compare(world: Any, parts: Any, **options: Any) -> None:
    """Compares outputs, gradients and statistics of two steps and an evaluation."""
    whole = torch.cat(parts)
    ours = hvd.SyncBatchNorm(3, **options).double()
    reference = NORMS[whole.dim()](3, **options).double()
    if options.get("affine", True):
        with torch.no_grad():
            for norm in (ours, reference):
                norm.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
                norm.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    mine = slice(
        sum(len(p) for p in parts[: world.rank]),
        sum(len(p) for p in parts[: world.rank + 1]),
    )
    weight = torch.arange(whole.numel()).double().view_as(whole).sin()
    for _ in range(2):
        x, y = (t.clone().requires_grad_() for t in (whole[mine], whole))
        out, expected = ours(x), reference(y)
        torch.testing.assert_close(out, expected[mine])
        (out * weight[mine]).sum().backward()
        (expected * weight).sum().backward()
        torch.testing.assert_close(x.grad, y.grad[mine])
    for name, value in reference.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), value)
    for name, parameter in reference.named_parameters():
        total = hvd.allreduce(ours.get_parameter(name).grad, op=hvd.Sum)
        torch.testing.assert_close(total, parameter.grad)
    ours.eval(), reference.eval()
    torch.testing.assert_close(ours(whole[mine]), reference(whole)[mine])


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("rest", [(), (5,), (2, 3), (2, 1, 2)], ids=str)
def test_batch_norm_over_ranks_equals_one_batch(world, rest: tuple[int, ...]) -> None:
    compare(world, batches(world.size, rest))


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.5, "momentum": 0.7},
    ],
    ids=str,
)
def test_options(world, options: dict[str, Any]) -> None:
    compare(world, batches(world.size, (2,)), **options)


def test_uneven_batches(world) -> None:
    compare(world, batches(world.size, (2,), [r + 2 for r in range(world.size)]))


@pytest.mark.ranks(2, 3)
def test_a_rank_without_a_batch_takes_part(world) -> None:
    rows = [3] * (world.size - 1) + [0]
    compare(world, batches(world.size, (2,), rows))


@pytest.mark.ranks(2, 3)
def test_one_value_on_each_rank_is_enough(world) -> None:
    compare(world, batches(world.size, (), [1] * world.size))


def test_half_precision(world) -> None:
    parts = [p.bfloat16() for p in batches(world.size, (2,))]
    norm = hvd.SyncBatchNorm(3)
    out = norm(parts[world.rank])
    assert out.dtype == torch.bfloat16
    reference = torch.nn.BatchNorm1d(3)(torch.cat(parts).float())
    mine = reference[4 * world.rank : 4 * world.rank + 4]
    torch.testing.assert_close(out.float(), mine, rtol=0.02, atol=0.02)


def test_frozen_parameters(world) -> None:
    norm = hvd.SyncBatchNorm(3).double()
    norm.weight.requires_grad_(False)
    x = batches(world.size, ())[world.rank].requires_grad_()
    norm(x).square().sum().backward()
    assert norm.weight.grad is None
    assert norm.bias.grad is not None
    assert x.grad is not None


def test_a_whole_model_is_converted(world) -> None:
    layers = [torch.nn.Conv2d(1, 3, 2), hvd.SyncBatchNorm(3), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers)
    model(torch.randn(2, 1, 4, 4)).sum().backward()
    assert "1.running_var" in model.state_dict()
    assert model[1].num_batches_tracked.item() == 1


def test_bad_input(world) -> None:
    with raises(ValueError, "expected at least 2D input (got 1D input)"):
        hvd.SyncBatchNorm(3)(torch.ones(3))
    with raises(ValueError, "more than 1 value per channel"):
        if world.size == 1:
            hvd.SyncBatchNorm(3)(torch.ones(1, 3))
        else:
            hvd.SyncBatchNorm(3)(torch.ones(int(world.rank == 0), 3))
