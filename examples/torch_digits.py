"""A small convolutional network reads handwritten digits with PyTorch, data-parallel.

    python torch_digits.py                    one rank
    ringrun -np 2 python torch_digits.py      two ranks, the same global batch

The data and the network are those of `jax_digits.py`: 1,797 real images of 8 × 8 pixels
inside the wheel of scikit-learn. In every step the ranks share one global batch, so the
number of ranks changes the speed and not the result. A program for Horovod differs only
by its import. Needs ``pip install "ringjax[torch,examples]"``.

To go further: ``--batch 384 --learning-rate 4e-3`` gives more ranks something to do,
``--compression bf16`` halves the bytes, ``--adasum`` adds gradients by their angle. See
also `torch_synthetic_benchmark.py`, and `mixed_frameworks.py` for PyTorch beside JAX.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import ringjax.torch as hvd

TEST_IMAGES = 360


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=48, help="images of all ranks")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--compression", choices=("none", "fp16", "bf16"), default="none"
    )
    parser.add_argument("--adasum", action="store_true", help="1, 2, 4, … ranks only")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load(seed: int) -> list[torch.Tensor]:
    """Loads training data and test data, which are equal on all ranks."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = torch.tensor(digits.images[order, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target[order])
    parts = [x.split([len(x) - TEST_IMAGES, TEST_IMAGES]) for x in (images, labels)]
    return [part[which] for which in (0, 1) for part in parts]


def shifted(images: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Moves every image by its own -1, 0 or 1 pixel, down and to the right."""
    padded = functional.pad(images, (1, 1, 1, 1))
    down, right = (1 + torch.arange(8) - steps[:, i, None] for i in (0, 1))
    which = torch.arange(len(steps))[:, None, None]
    return padded[which, 0, down[:, :, None], right[:, None, :]][:, None]


def make_network() -> nn.Module:
    """Returns a network with two convolutions and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def measure(network: nn.Module, images: torch.Tensor, labels: torch.Tensor):
    """Returns the loss and the accuracy."""
    logits = network(images)
    accuracy = (logits.argmax(-1) == labels).float().mean()
    return functional.cross_entropy(logits, labels), accuracy


def evaluate(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the accuracy on all test images. Each rank tests its share."""
    share = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        correct = (network(images[share]).argmax(-1) == labels[share]).sum()
    return hvd.allreduce(correct, op=hvd.Sum, name="correct").item() / len(labels)


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    # The ranks of a host share its cores.
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))
    torch.manual_seed(arguments.seed + rank)  # the broadcast makes ranks equal
    images, labels, *test = load(arguments.seed)
    share = max(arguments.batch // size, 1)
    steps = len(labels) // (share * size)

    network = make_network()
    optimizer = torch.optim.Adam(network.parameters(), lr=arguments.learning_rate)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=network.named_parameters(),
        compression=getattr(hvd.Compression, arguments.compression),
        op=hvd.Adasum if arguments.adasum else hvd.Average,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, max(steps * arguments.epochs, 1)
    )
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if rank == 0:
        count = sum(p.numel() for p in network.parameters())
        print(f"{size} rank(s), {share * size} images a step, {count:,} parameters")

    # All ranks draw an equal order, and each rank takes its share of every batch.
    generator = torch.Generator().manual_seed(arguments.seed + 1)
    accuracy = evaluate(network, *test)
    for epoch in range(1, arguments.epochs + 1):
        started, used = time.perf_counter(), steps * share * size
        order = torch.randperm(len(labels), generator=generator)[:used]
        varied = shifted(
            images, torch.randint(-1, 2, (len(labels), 2), generator=generator)
        )
        history = []
        for rows in order.reshape(steps, size, share):
            optimizer.zero_grad()
            metrics = measure(network, varied[rows[rank]], labels[rows[rank]])
            metrics[0].backward()
            optimizer.step()
            schedule.step()
            history.append(torch.stack(metrics).detach())
        seconds = time.perf_counter() - started
        loss, train = hvd.allreduce(torch.stack(history).mean(0), name="metrics")
        accuracy = evaluate(network, *test)
        if rank == 0:
            print(
                f"epoch {epoch:2}: loss {loss:.4f}  train {train:6.2%}  "
                f"test {accuracy:6.2%}  {used / seconds:6.0f} images/s",
                flush=True,
            )
    if rank == 0:
        print(f"result: {accuracy:.2%} of {TEST_IMAGES} unseen digits read correctly")
        print("to go further: python torch_digits.py --help, torch_synthetic_benchmark")


if __name__ == "__main__":
    main()
