"""ringjax.torch with tensors of a GPU that two ranks share.

Only results count, because the ranks take turns on the device and use sockets.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
from support import gpu_ranks

torch = pytest.importorskip("torch")
import ringjax.torch as hvd  # noqa: E402

pytestmark = pytest.mark.ranks(2, env=gpu_ranks.environment)
DEVICE = torch.device("cpu" if gpu_ranks.ON_CPU else "cuda:0")
DTYPES = (
    "uint8",
    "int8",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)


@pytest.fixture(autouse=True)
def torch_device(separate_host: None, request: pytest.FixtureRequest) -> None:
    """Makes the device current, or skips the test if PyTorch finds none."""
    if DEVICE.type == "cuda":
        if not torch.cuda.is_available():
            pytest.skip(f"PyTorch {torch.__version__} finds no CUDA device")
        torch.cuda.set_device(DEVICE)
    torch.set_num_threads(2)  # all ranks are on one machine
    request.getfixturevalue("world")


def draw(rank: int, shape: Any, dtype: str = "float32") -> Any:
    """Returns the tensor of a rank: small numbers with exact sums in every type."""
    generator = torch.Generator().manual_seed(rank + 1)
    values = torch.randint(0, 5, shape, generator=generator)
    return values.to(getattr(torch, dtype)).to(DEVICE)


def total(size: int, shape: Any, dtype: str = "float32") -> Any:
    return sum(draw(rank, shape, dtype) for rank in range(size))


def equal(got: Any, want: Any) -> None:
    assert got.device == want.device
    assert got.dtype == want.dtype
    assert torch.equal(got, want), (got, want)


def check_equal_on_all_ranks(model: Any, name: str) -> Any:
    """Returns all weights of a model, which must have equal bits on all ranks."""
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = hvd.allgather(weights[None], name=name)
    assert all(torch.equal(every[0], other) for other in every)
    return weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(world, dtype) -> None:
    for shape in ((), (17, 5), (600_001,)):
        out = hvd.allreduce(draw(world.rank, shape, dtype), op=hvd.Sum)
        equal(out, total(world.size, shape, dtype))


def test_averages_in_place(world) -> None:
    x = draw(world.rank, (1001,))
    hvd.allreduce_(x, op=hvd.Average)
    equal(x, total(world.size, (1001,)) / world.size)


def test_161_tensors_in_any_order(world) -> None:
    """Each rank submits in its own order and waits in another order."""
    shapes = [(1 + 37 * i,) for i in range(161)]
    order = list(range(161))[:: 1 if world.rank == 0 else -1]
    handles = {
        i: hvd.allreduce_async(draw(world.rank, shapes[i]), name=f"g{i}", op=hvd.Sum)
        for i in order
    }
    for i in sorted(order, key=lambda i: i % 7):
        equal(hvd.synchronize(handles[i]), total(world.size, shapes[i]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_and_uneven_allgather_and_alltoall(world, dtype) -> None:
    rank, last = world.rank, world.size - 1
    mine = draw(rank, (rank + 1, 3), dtype)
    equal(hvd.broadcast(draw(rank, (5,), dtype), last), draw(last, (5,), dtype))
    rows = torch.cat([draw(k, (k + 1, 3), dtype) for k in range(world.size)])
    equal(hvd.allgather(mine), rows)
    splits = [0] * last + [rank + 1]  # all rows go to the last rank
    out, received = hvd.alltoall(mine, splits)
    equal(out, rows if rank == last else mine[:0])
    counts = [k + 1 if rank == last else 0 for k in range(world.size)]
    assert received.tolist() == counts


def test_uneven_reducescatter(world) -> None:
    rank, size = world.rank, world.size
    bounds = [7 // size * k + min(k, 7 % size) for k in range(size + 1)]
    out = hvd.reducescatter(draw(rank, (7, 2)), op=hvd.Sum)
    equal(out, total(size, (7, 2))[bounds[rank] : bounds[rank + 1]])


@pytest.mark.skipif(gpu_ranks.ON_CPU, reason="a CPU has no streams")
def test_another_stream_after_slow_work_with_memory_freed_early(world) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for step in range(20):
        with torch.cuda.stream(side):
            a = torch.randn(1500, 1500, device=DEVICE)
            for _ in range(5):
                a = a @ a / 40
            x = torch.full((400_003,), float(step), device=DEVICE) + 0 * a[0, 0]
            handle = hvd.allreduce_async(x, name="side", op=hvd.Sum)
            del x  # the next lines must not reuse the memory of x
            garbage = torch.full((400_003,), 1e9, device=DEVICE)
        out = hvd.synchronize(handle)  # the result is used on the outer stream
        assert bool((out == step * world.size).all()), step
        del out, garbage
    torch.cuda.synchronize()


def test_training_by_a_distributed_optimizer(world) -> None:
    torch.manual_seed(world.rank)
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters()
    )
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(world.rank))
    x = x.to(DEVICE)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = ((model(x) - x[:, :1]) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    check_equal_on_all_ranks(model, "trained")


def test_gradients_scaled_and_clipped_after_backward(world) -> None:
    def train(rows: Any, distributed: bool) -> Any:
        torch.manual_seed(2)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 1)
        ).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if distributed:
            names = [(f"clipped.{n}", p) for n, p in model.named_parameters()]
            optimizer = hvd.DistributedOptimizer(optimizer, names)
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
        for step in range(6):
            optimizer.zero_grad()
            loss = ((model(rows) - 3) ** 2).mean()
            bad = step == 2 and (not distributed or world.rank == 1)
            scaler.scale(loss * torch.inf if bad else loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)  # no rank may make a step with infinities
            scaler.update()
        return model

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(32, 64, generator=generator).to(DEVICE)
    ours = check_equal_on_all_ranks(train(x[world.rank :: world.size], True), "clipped")
    alone = torch.cat([p.detach().flatten() for p in train(x, False).parameters()])
    torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-5)


def test_join_with_less_data_on_the_last_rank(world) -> None:
    last = world.size - 1
    if world.rank < last:
        out = hvd.allreduce(draw(world.rank, (9,)), op=hvd.Sum, name="uneven")
        equal(out, total(last, (9,)))
    hvd.join()


# This test is the last one, because each of the others might load JAX.
def test_jax_is_not_loaded(world) -> None:
    assert "jax" not in sys.modules
