"""The interface of an adapter for a library, and the types that it is given.

Adapters call their library as its users would; when and how often: harness/worker.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Shapes = Sequence[tuple[int, ...]]
# The kinds of cases. A peer has an attribute for each: the names of its variants.
KINDS = ("arrays", "models", "streams", "trainings", "collectives")
COLLECTIVES = ("allreduce", "broadcast", "allgather", "alltoall", "reducescatter")
# Blocks until the result is there. If it has a method repeat(calls), that is timed
# instead of a loop here: where a call takes less than Python needs to make it.
Operation = Callable[[], Any]


class Peer(Protocol):
    """One rank of one library. Only one of them is ever made in a process.

    Attributes:
      rank, size: of this process among the library's ranks.
      version: of the library and what it stands on.
      arrays: names of the variants for one array, summed; the first is the usual one.
      models: names of the variants for a list of gradients, averaged.
      streams: names of the variants for bytes over loopback TCP.
      dtypes: what it can add.
      trainings: names of the variants for steps of training a real network.
      networks: those of torch_networks.py that it trains.
      collectives: those of COLLECTIVES that it has.
    """

    rank: int
    size: int
    version: str
    arrays: tuple[str, ...]
    models: tuple[str, ...]
    streams: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    trainings: tuple[str, ...] = ()
    networks: tuple[str, ...] = ("resnet50", "transformer", "dense")
    collectives: tuple[str, ...] = ()

    def __init__(self, rank: int, size: int, port: int) -> None: ...
    def total(self, value: float) -> float:
        """The sum of `value` over all ranks."""

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        """A function that reduces tensors of these shapes and waits for the result."""

    def training(self, variant: str, network: str) -> Operation:
        """A step of training a network of torch_networks.py."""
        raise ValueError(f"{variant}: no training of {network}")

    def collective(self, name: str, given: Array, out: Array) -> Operation:
        """A function that sums, or moves from rank 0, and waits for the result.

        It puts that into `out`, which of allreduce and broadcast is `given` itself; a
        library that cannot do so returns it.
        """
        raise ValueError(f"no {name} of {given.size} numbers into {out.size}")

    def local(self, result: Any) -> Array:
        """The result of a collective on this rank, as numpy."""
        return np.asarray(result)

    def close(self) -> None:
        """Leaves the world in good order."""


def jit_loop(step: Callable[[Any], Any], start: Any, donated: bool) -> Operation:
    """Calls a compiled function on the same input, or on its own last output."""
    import jax

    held = [start]

    def once() -> Any:
        out = jax.block_until_ready(step(held[0]))
        if donated:
            held[0] = out
        return out

    return once
