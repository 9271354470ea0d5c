"""PyTorch's CUDA tensors through ringjax.torch: two ranks on the one GPU.

Only results are checked, because the ranks take turns on the device and use sockets.
Without PyTorch, or without CUDA in PyTorch, the section says so and does not fail. With
`--cpu` the same checks run on tensors of the host.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import sharing
from benchmarks.gpu.ranks import finish
from benchmarks.gpu.section import missing, section

SIZE = 2
LIMIT = 45.0  # time limit of the ranks in seconds
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


class Rank:
    """The checks of one rank."""

    def __init__(self, device: str) -> None:
        import torch

        import ringjax.torch as hvd

        torch.set_num_threads(2)  # all ranks are on one machine
        self.torch, self.hvd = torch, hvd
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        if self.cuda:
            torch.cuda.set_device(self.device)

    def of(self, rank: int, shape: Any, dtype: str = "float32") -> Any:
        """Returns the tensor of a rank: small numbers with exact sums in every type."""
        torch = self.torch
        drawn = torch.Generator().manual_seed(rank + 1)
        values = torch.randint(0, 5, shape, generator=drawn)
        return values.to(getattr(torch, dtype)).to(self.device)

    def equal(self, got: Any, want: Any) -> None:
        assert got.device == want.device, (got.device, want.device)
        assert got.dtype == want.dtype, (got.dtype, want.dtype)
        assert self.torch.equal(got, want), (got, want)


def reductions(r: Rank) -> None:
    """Checks sums of every type, small and large, and averages in place."""
    for dtype in DTYPES:
        for shape in ((), (17, 5), (600_001,)):
            out = r.hvd.allreduce(r.of(r.rank, shape, dtype), op=r.hvd.Sum)
            r.equal(out, sum(r.of(k, shape, dtype) for k in range(r.size)))
    x = r.of(r.rank, (1001,))
    r.hvd.allreduce_(x, op=r.hvd.Average)
    r.equal(x, sum(r.of(k, (1001,)) for k in range(r.size)) / r.size)


def in_any_order(r: Rank) -> None:
    """Checks 161 tensors: each rank submits in its own order and waits in another."""
    shapes = [(1 + 37 * i,) for i in range(161)]
    order = list(range(161))[:: 1 if r.rank == 0 else -1]
    handles = {
        i: r.hvd.allreduce_async(r.of(r.rank, shapes[i]), name=f"g{i}", op=r.hvd.Sum)
        for i in order
    }
    for i in sorted(order, key=lambda i: i % 7):
        want = sum(r.of(k, shapes[i]) for k in range(r.size))
        r.equal(r.hvd.synchronize(handles[i]), want)


def movements(r: Rank) -> None:
    """Checks broadcast, uneven allgather and alltoall, and uneven reducescatter."""
    torch, hvd = r.torch, r.hvd
    last = r.size - 1
    for dtype in DTYPES:
        mine = r.of(r.rank, (r.rank + 1, 3), dtype)
        r.equal(hvd.broadcast(r.of(r.rank, (5,), dtype), last), r.of(last, (5,), dtype))
        rows = [r.of(k, (k + 1, 3), dtype) for k in range(r.size)]
        r.equal(hvd.allgather(mine), torch.cat(rows))
        splits = [0] * last + [r.rank + 1]  # all rows go to the last rank
        out, received = hvd.alltoall(mine, splits)
        r.equal(out, torch.cat(rows) if r.rank == last else mine[:0])
        assert received.tolist() == [
            k + 1 if r.rank == last else 0 for k in range(r.size)
        ]
    bounds = [7 // r.size * k + min(k, 7 % r.size) for k in range(r.size + 1)]
    out = hvd.reducescatter(r.of(r.rank, (7, 2)), op=hvd.Sum)
    want = sum(r.of(k, (7, 2)) for k in range(r.size))
    r.equal(out, want[bounds[r.rank] : bounds[r.rank + 1]])


def streams(r: Rank) -> None:
    """Checks a stream of its own, after slow work, with memory that is freed early."""
    torch, hvd = r.torch, r.hvd
    if not r.cuda:
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for step in range(20):
        with torch.cuda.stream(side):
            a = torch.randn(1500, 1500, device=r.device)
            for _ in range(5):
                a = a @ a / 40
            x = torch.full((400_003,), float(step), device=r.device) + 0 * a[0, 0]
            handle = hvd.allreduce_async(x, name="side", op=hvd.Sum)
            del x  # the next lines must not reuse the memory of x
            garbage = torch.full((400_003,), 1e9, device=r.device)
        out = hvd.synchronize(handle)  # the result is used on the outer stream
        assert bool((out == step * r.size).all()), step
        del out, garbage
    torch.cuda.synchronize()


def training(r: Rank) -> list[float]:
    """Trains a small network for twenty steps; all ranks must have the same bits."""
    torch, hvd = r.torch, r.hvd
    torch.manual_seed(r.rank)
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers).to(r.device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters()
    )
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(r.rank))
    x = x.to(r.device)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = ((model(x) - x[:, :1]) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = hvd.allgather(weights[None])
    assert all(torch.equal(every[0], other) for other in every), "other bits"
    return losses[-1:]


def touched(r: Rank) -> None:
    """Checks gradients that are scaled and clipped after backward, as with DDP."""
    torch, hvd = r.torch, r.hvd

    def train(rows: Any, distributed: bool) -> Any:
        torch.manual_seed(2)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 1)
        ).to(r.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if distributed:
            names = [(f"touched.{n}", p) for n, p in model.named_parameters()]
            optimizer = hvd.DistributedOptimizer(optimizer, names)
        scaler = torch.amp.GradScaler(r.device.type, init_scale=1024.0)
        for step in range(6):
            optimizer.zero_grad()
            loss = ((model(rows) - 3) ** 2).mean()
            bad = step == 2 and (not distributed or r.rank == 1)
            scaler.scale(loss * torch.inf if bad else loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)  # no rank may make a step with infinities
            scaler.update()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    drawn = torch.Generator().manual_seed(5)
    x = torch.randn(32, 64, generator=drawn).to(r.device)
    ours = train(x[r.rank :: r.size], True)
    every = hvd.allgather(ours[None], name="touched")
    assert all(torch.equal(every[0], other) for other in every), "other bits"
    torch.testing.assert_close(ours, train(x, False), rtol=1e-4, atol=1e-5)


def joined(r: Rank) -> None:
    """Checks `join`: the last rank has less data."""
    if r.rank < r.size - 1:
        out = r.hvd.allreduce(r.of(r.rank, (9,)), op=r.hvd.Sum, name="uneven")
        r.equal(out, sum(r.of(k, (9,)) for k in range(r.size - 1)))
    r.hvd.join()


CASES: dict[str, Callable[[Rank], Any]] = {
    "sums and averages": reductions,
    "161 tensors in any order": in_any_order,
    "broadcast, allgather, alltoall, reducescatter": movements,
    "streams and memory": streams,
    "DistributedOptimizer, 20 steps": training,
    "gradients scaled and clipped after backward": touched,
    "join": joined,
}


def be_a_rank(device: str, folder: Path) -> None:
    """Runs the cases; writes a line for each case."""
    sharing.prepare(int(os.environ.get("RINGJAX_RANK", "0")))
    here, failed = Rank(device), False
    with (folder / f"rank.{here.rank}").open("w") as file:
        for name, case in CASES.items():
            started, error = time.monotonic(), ""
            try:
                case(here)
            except Exception as caught:
                traceback.print_exc()
                error, failed = f"{type(caught).__name__}: {caught}", True
            seconds = time.monotonic() - started
            line = {"case": name, "error": error, "seconds": seconds}
            print(json.dumps(line), file=file, flush=True)
            if error:  # after an error the ranks make different calls
                break
        if "jax" in sys.modules:
            failed = True
            print(json.dumps({"case": "no JAX", "error": "was loaded", "seconds": 0}))
    here.hvd.shutdown()
    raise SystemExit(int(failed))


def reason_not_to(cpu: bool) -> str:
    """Returns why this section cannot run here; empty if it can."""
    if missing("torch"):
        return "PyTorch is not installed"
    import torch

    if not cpu and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no CUDA device"
    return ""


def main() -> None:
    """Starts the ranks and makes a table of their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="tensors of the host")
    parser.add_argument("--rank", action="store_true", help="be one of the ranks")
    options = parser.parse_args()
    device = "cpu" if options.cpu else "cuda:0"
    if options.rank:
        be_a_rank(device, options.work)
    with section() as report:
        report.table(f"PyTorch, {SIZE} ranks on {device}", "case", "result", "s")
        if why := reason_not_to(options.cpu):
            report.note(f"not run: {why}")
            return
        shutil.rmtree(options.work, ignore_errors=True)
        options.work.mkdir(parents=True)
        words = [
            "-m",
            "benchmarks.gpu.torch_tensors",
            "--rank",
            "--work",
            str(options.work),
        ]
        words += ["--cpu"] if options.cpu else []
        job = ["-m", "ringjax.run", "-np", str(SIZE), sys.executable, "-P", *words]
        try:
            finish([job], os.environ, options.work / "log", LIMIT)
        except RuntimeError as error:
            report.fail(str(error))
        for rank in range(SIZE):
            file = options.work / f"rank.{rank}"
            lines = file.read_text().splitlines() if file.exists() else []
            said = [json.loads(line) for line in lines]
            for one in said:
                wrong = f"FAILED: {one['error'][:200]}" if one["error"] else "ok"
                name = f"{one['case']}, rank {rank}"
                report.row(name, wrong, f"{one['seconds']:.2f}")
                if one["error"]:
                    report.fail(f"{name}: {one['error'][:300]}")
            if len(said) < len(CASES):
                report.fail(
                    f"rank {rank} has come to {len(said)} of {len(CASES)} cases"
                )


if __name__ == "__main__":
    main()
