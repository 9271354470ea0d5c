"""horovod.torch under its own launcher, and ringjax.torch with the same calls."""

from __future__ import annotations

import importlib
import os
from typing import Any

from benchmarks.peers.adapter import COLLECTIVES, Array, Operation, Peer, Shapes


def out_of_place(hvd: Any, tensor: Any, called: str) -> dict[str, Operation]:
    """Every collective of Horovod's API on a tensor, with the result in new memory."""
    return {
        "allreduce": lambda: hvd.allreduce(tensor, op=hvd.Sum, name=called),
        "broadcast": lambda: hvd.broadcast(tensor, 0, name=called),
        "allgather": lambda: hvd.allgather(tensor, name=called),
        "alltoall": lambda: hvd.alltoall(tensor, name=called),
        "reducescatter": lambda: hvd.reducescatter(tensor, op=hvd.Sum, name=called),
    }


class Horovod(Peer):
    """horovod.torch, under its own launcher."""

    arrays = ("allreduce_ in place",)
    models = ("async, fused", "grouped")
    dtypes: tuple[str, ...] = ("float32",)
    trainings = ("together", "alone")
    collectives = COLLECTIVES
    package = "horovod"

    def __init__(self, rank: int, size: int, port: int) -> None:
        import torch

        package = importlib.import_module(self.package)
        hvd = importlib.import_module(f"{self.package}.torch")
        hvd.init()
        self._hvd, self._torch = hvd, torch
        self.rank, self.size = hvd.rank(), hvd.size()
        self.version = f"{package.__version__}, torch {torch.__version__}"
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.size))

    def total(self, value: float) -> float:
        x = self._torch.full((1,), value)
        return float(self._hvd.allreduce(x, op=self._hvd.Sum, name="total")[0])

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        """Makes the blocking function, with the same names in every call."""
        hvd, kind = self._hvd, getattr(self._torch, dtype)
        tensors = [self._torch.zeros(s, dtype=kind) for s in shapes]
        key = f"{variant}/{len(shapes)}/{tensors[0].numel()}"
        names = [f"{key}/{i}" for i in range(len(tensors))]
        if variant in self.arrays:
            return lambda: hvd.allreduce_(tensors[0], op=hvd.Sum, name=names[0])
        if variant == "grouped":
            return lambda: hvd.grouped_allreduce_(tensors, op=hvd.Average, name=key)

        def step() -> None:
            handles = [
                hvd.allreduce_async_(t, op=hvd.Average, name=n)
                for t, n in zip(tensors, names, strict=True)
            ]
            for handle in handles:
                hvd.synchronize(handle)

        return step

    def collective(self, name: str, given: Array, out: Array) -> Operation:
        hvd, tensor = self._hvd, self._torch.from_numpy(given)
        called = f"{name}/{given.size}"
        in_place = {
            "allreduce": lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=called),
            "broadcast": lambda: hvd.broadcast_(tensor, 0, name=called),
        }
        return (out_of_place(hvd, tensor, called) | in_place)[name]

    def training(self, variant: str, network: str) -> Operation:
        """Returns a step with a DistributedOptimizer, or without it."""
        from benchmarks.harness import torch_networks

        def wrap(module: Any, optimizer: Any) -> tuple[Any, Any]:
            named = [(f"{network}.{n}", p) for n, p in module.named_parameters()]
            self._hvd.broadcast_parameters(module.state_dict(), root_rank=0)
            return module, self._hvd.DistributedOptimizer(optimizer, named)

        return torch_networks.training(network, wrap if variant == "together" else None)

    def close(self) -> None:
        self._hvd.shutdown()


class RingjaxTorch(Horovod):
    """ringjax.torch, with the calls of horovod.torch."""

    dtypes = ("float32", "bfloat16")
    package = "ringjax"
