"""The interface of an adapter for a library, and the types that it is given.

Adapters call a library as its users do. harness/worker.py decides when and how often.
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
# A call that blocks until the result is available. If the object has a method
# repeat(calls), that method is timed instead of a loop, because a call may be faster
# than Python.
Operation = Callable[[], Any]


class Peer(Protocol):
    """One rank of one library. A process makes only one such object.

    Attributes:
      rank, size: the rank of this process, and the number of the library's ranks.
      version: the versions of the library and of its base.
      arrays: names of the variants that sum one array; the first name is the default.
      models: names of the variants for a list of gradients, averaged.
      streams: names of the variants for bytes over loopback TCP.
      dtypes: the dtypes that the library can add.
      trainings: names of the variants for steps of training a real network.
      networks: the networks of torch_networks.py that the library can train.
      collectives: the entries of COLLECTIVES that the library has.
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
        """Returns the sum of `value` over all ranks."""

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        """Returns a function that reduces tensors and waits for the result."""

    def training(self, variant: str, network: str) -> Operation:
        """Returns a training step of a network of torch_networks.py."""
        raise ValueError(f"{variant}: no training of {network}")

    def collective(self, name: str, given: Array, out: Array) -> Operation:
        """Returns a function that runs a collective and waits for the result.

        The function writes the result into `out`, which is `given` itself for allreduce
        and broadcast. If the library cannot write into `out`, the function returns the
        result.
        """
        raise ValueError(f"no {name} of {given.size} numbers into {out.size}")

    def local(self, result: Any) -> Array:
        """Returns the result of a collective on this rank, as numpy."""
        return np.asarray(result)

    def close(self) -> None:
        """Leaves the world without an error."""


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
