"""JAX on one rank and PyTorch on another take part in one operation.

    python mixed_frameworks.py                    one rank, JAX
    ringrun -np 2 python mixed_frameworks.py      rank 0 with JAX, rank 1 with PyTorch

A named operation needs only the address, the type and the shape of an array. So even
ranks pass a JAX array and odd ranks a PyTorch tensor, and each rank gets the sum as an
array of its own framework. Below, all ranks fit one straight line. Every rank has its
own points and computes its gradient in its own framework. Needs
``pip install "ringjax[torch]"``.

To go further: ``--points 100000``, more ranks, or a third framework. Every object with
``__dlpack__`` or a buffer works, for example a NumPy array.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

import ringjax
from ringjax import eager

SLOPE, OFFSET = 3.0, -1.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=200, help="of each rank")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=0.3)
    return parser.parse_args()


class WithJax:
    """Trains the line in JAX."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        import jax
        import jax.numpy as jnp

        def error(line: Any) -> Any:
            return jnp.mean((line[0] * x + line[1] - y) ** 2)

        self._gradient = jax.jit(jax.grad(error))
        self.line = jnp.zeros(2)

    def step(self, rate: float) -> None:
        """Updates the line by the average of the gradients of all ranks."""
        gradient = self._gradient(self.line)
        self.line = self.line - rate * eager.allreduce(gradient, name="gradient")


class WithTorch:
    """Trains the line in PyTorch, with Horovod's functions."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        import torch

        self._x, self._y = torch.from_numpy(x), torch.from_numpy(y)
        self.line = torch.zeros(2, requires_grad=True)

    def step(self, rate: float) -> None:
        """Updates the line by the average of the gradients of all ranks."""
        import torch

        import ringjax.torch as hvd

        error = ((self.line[0] * self._x + self.line[1] - self._y) ** 2).mean()
        (gradient,) = torch.autograd.grad(error, self.line)
        with torch.no_grad():
            self.line -= rate * hvd.allreduce(gradient, name="gradient")


def main() -> None:
    arguments = parse_arguments()
    ringjax.init()
    rank, size = ringjax.rank(), ringjax.size()
    rng = np.random.default_rng(rank)
    x = rng.uniform(-1, 1, arguments.points).astype(np.float32)
    noise = rng.normal(0, 0.1, arguments.points)
    y = (SLOPE * x + OFFSET + noise).astype(np.float32)
    model = (WithTorch if rank % 2 else WithJax)(x, y)
    for _ in range(arguments.steps):
        model.step(arguments.learning_rate)

    loaded = [name for name in ("jax", "torch") if name in sys.modules]
    kind = f"{type(model.line).__module__}.{type(model.line).__name__}"
    print(f"rank {rank}: its line is a {kind}, it has loaded {' and '.join(loaded)}")
    own = np.array([[value.item() for value in model.line]])
    lines = eager.allgather(own, name="lines")
    if rank == 0:
        alike = "alike" if np.ptp(lines, axis=0).max() < 1e-5 else "NOT ALIKE"
        slope, offset = lines[0]
        print(f"result: y = {slope:.3f} x {offset:+.3f}, {alike} on {size} rank(s)")


if __name__ == "__main__":
    main()
