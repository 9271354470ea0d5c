"""Measures how fast a residual network trains, with ringjax and without.

    python torch_synthetic_benchmark.py                  one rank
    ringrun -np 2 python torch_synthetic_benchmark.py    two ranks

Every rank trains on a batch of its own. Rounds in which the ranks train independently
alternate with rounds in which a DistributedOptimizer averages the gradients. The
difference is the cost of communication. The default model is ResNet-50 with its 161
tensors and 25.6 million parameters. The images are random, and small enough for CPUs.
Needs ``pip install "ringjax[torch]"``.

To go further: ``--image 224 --batch 32`` is the usual size, ``--blocks 3 4 23 3`` is
ResNet-101, ``--fp16-allreduce`` halves the bytes, and ``--device cuda`` uses GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

import ringjax.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="images of each rank")
    parser.add_argument("--image", type=int, default=32, help="pixels on a side")
    parser.add_argument("--width", type=int, default=64, help="channels at first")
    parser.add_argument("--blocks", type=int, nargs=4, default=(3, 4, 6, 3))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args()


class Bottleneck(nn.Module):
    """A residual block: three convolutions, and a path around them."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.path = nn.Sequential(
            *(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner)),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False),
            *(nn.BatchNorm2d(inner), nn.ReLU(inplace=True)),
            *(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.around: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            fit = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.around = nn.Sequential(fit, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the two paths. With stride 2 the result has half the pixels each way."""
        return functional.relu(self.path(x) + self.around(x))


def make_network(blocks: list[int], width: int) -> nn.Sequential:
    """Returns a residual network. ResNet-50 has 3, 4, 6 and 3 blocks of width 64."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        *(nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    inputs = width
    for stage, count in enumerate(blocks):
        inner = width << stage
        for block in range(count):
            layers.append(Bottleneck(inputs, inner, 2 if stage and not block else 1))
            inputs = 4 * inner
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]
    return nn.Sequential(*layers)


def make_step(
    arguments: argparse.Namespace, distributed: bool
) -> tuple[nn.Module, Callable[[], object]]:
    """Returns a network, and a function that trains it on one batch again and again."""
    network = make_network(arguments.blocks, arguments.width).to(arguments.device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    if distributed:
        fp16 = arguments.fp16_allreduce
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=network.named_parameters(),
            compression=hvd.Compression.fp16 if fp16 else hvd.Compression.none,
        )
        hvd.broadcast_parameters(network.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    side = arguments.image
    images = torch.randn(arguments.batch, 3, side, side, device=arguments.device)
    labels = torch.randint(1000, (arguments.batch,), device=arguments.device)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(network(images), labels).backward()
        optimizer.step()

    return network, step


def seconds_of(step: Callable[[], object], steps: int) -> float:
    """Returns the mean seconds of a step. All ranks start at once."""
    hvd.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if arguments.device == "cuda":
        torch.cuda.set_device(hvd.local_rank())
    else:  # the ranks of a host share its cores
        torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))
    torch.manual_seed(rank)
    network, with_ringjax = make_step(arguments, distributed=True)
    _, without = make_step(arguments, distributed=False)
    if rank == 0:
        sizes = [p.numel() for p in network.parameters()]
        print(
            f"{size} rank(s), {arguments.batch} images of {arguments.image} × "
            f"{arguments.image} each, {len(sizes)} tensors, {sum(sizes):,} parameters"
        )

    for step in (without, with_ringjax):  # the first step is slow
        seconds_of(step, 1)
    speeds: dict[str, list[float]] = {"without ringjax": [], "with ringjax": []}
    for number in range(1, arguments.rounds + 1):
        for title, step in zip(speeds, (without, with_ringjax), strict=True):
            speed = torch.tensor(arguments.batch / seconds_of(step, arguments.steps))
            total = hvd.allreduce(speed, op=hvd.Sum, name="speed").item()
            speeds[title].append(total)
        if rank == 0:
            found = "  ".join(f"{title}: {v[-1]:6.1f}" for title, v in speeds.items())
            print(f"round {number}: images/s of all ranks  {found}", flush=True)
    if rank == 0:
        for title, values in speeds.items():
            median, best = statistics.median(values), max(values)
            print(f"{title:15}: {median:6.1f} images/s, {best:.1f} in the best round")
        alone, shared = (statistics.median(values) for values in speeds.values())
        print(f"result: together {shared / alone:.0%} of the speed of {size} alone")


if __name__ == "__main__":
    main()
