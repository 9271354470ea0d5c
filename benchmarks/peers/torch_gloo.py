"""torch.distributed on Gloo: its allreduce, and DistributedDataParallel."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.peers.adapter import COLLECTIVES, Array, Operation, Peer, Shapes

BUCKET_BYTES = 25 << 20  # the default of DistributedDataParallel


class TorchGloo(Peer):
    """torch.distributed on Gloo, with gradients one by one or in DDP's buckets."""

    arrays = ("all_reduce in place",)
    models = ("DistributedDataParallel", "25 MiB buckets", "one by one, async")
    trainings = ("together", "alone")
    collectives = COLLECTIVES

    def __init__(self, rank: int, size: int, port: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist

        self.rank, self.size, self.version = rank, size, torch.__version__
        self._torch, self._dist = torch, dist
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)

    def total(self, value: float) -> float:
        x = self._torch.full((1,), value)
        self._dist.all_reduce(x)
        return float(x[0])

    def operation(self, variant: str, shapes: Shapes, dtype: str) -> Operation:
        kind = getattr(self._torch, dtype)
        tensors = [self._torch.zeros(s, dtype=kind) for s in shapes]
        if variant in self.arrays:
            return lambda: self._dist.all_reduce(tensors[0])
        if variant.startswith("Distributed"):
            return self._ddp(tensors)
        return self._buckets(tensors) if "buckets" in variant else self._each(tensors)

    def collective(self, name: str, given: Array, out: Array) -> Operation:
        dist = self._dist
        own, result = map(self._torch.from_numpy, (given, out))
        return {
            "allreduce": lambda: dist.all_reduce(result),
            "broadcast": lambda: dist.broadcast(result, 0),
            "allgather": lambda: dist.all_gather_into_tensor(result, own),
            "alltoall": lambda: dist.all_to_all_single(result, own),
            "reducescatter": lambda: dist.reduce_scatter_tensor(result, own),
        }[name]

    def training(self, variant: str, network: str) -> Operation:
        """Returns a step with DistributedDataParallel, or without it."""
        from benchmarks.harness import torch_networks

        def wrap(module: Any, optimizer: Any) -> tuple[Any, Any]:
            parallel = self._torch.nn.parallel.DistributedDataParallel(
                module, gradient_as_bucket_view=True
            )
            return parallel, optimizer

        return torch_networks.training(network, wrap if variant == "together" else None)

    def _each(self, tensors: list[Any]) -> Operation:
        def step() -> None:
            works = [self._dist.all_reduce(t, async_op=True) for t in tensors]
            for work, tensor in zip(works, tensors, strict=True):
                work.wait()
                tensor.div_(self.size)

        return step

    def _ddp(self, gradients: list[Any]) -> Operation:
        """Returns a model whose backward pass only returns these gradients."""
        torch = self._torch

        class Give(torch.autograd.Function):  # type: ignore[misc, name-defined]
            """A loss whose derivatives are the given gradients."""

            @staticmethod
            def forward(context: Any, *parameters: Any) -> Any:
                return parameters[0].new_zeros(())

            @staticmethod
            def backward(context: Any, slope: Any) -> tuple[Any, ...]:
                return tuple(gradients)

        class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
            """A model whose parameters have the sizes of the gradients."""

            def __init__(self) -> None:
                super().__init__()
                self.held = torch.nn.ParameterList(map(torch.zeros_like, gradients))

            def forward(self) -> Any:
                return Give.apply(*self.held)

        parallel = torch.nn.parallel.DistributedDataParallel(
            Model(),
            bucket_cap_mb=BUCKET_BYTES >> 20,
            gradient_as_bucket_view=True,
        )

        # Do not call zero_grad: adding zeros to the buckets costs one pass, like a
        # copy. Cleared gradients would be copied twice, because this object holds them.
        def step() -> None:
            parallel().backward()

        step()  # DDP makes its buckets again after the first step
        return step

    def _buckets(self, tensors: list[Any]) -> Operation:
        """Copies into flat buffers, reduces them and copies back, as DDP does."""
        groups: list[list[Any]] = [[]]
        for tensor in reversed(tensors):  # the last gradients are ready first
            held = sum(t.nbytes for t in groups[-1])
            if groups[-1] and held + tensor.nbytes > BUCKET_BYTES:
                groups.append([])
            groups[-1].append(tensor)
        flats = [g[0].new_empty(sum(t.numel() for t in g)) for g in groups]

        def step() -> None:
            works = []
            for group, flat in zip(groups, flats, strict=True):
                self._torch.cat([t.view(-1) for t in group], out=flat)
                works.append(self._dist.all_reduce(flat, async_op=True))
            for work, group, flat in zip(works, groups, flats, strict=True):
                work.wait()
                flat.div_(self.size)
                parts = flat.split([t.numel() for t in group])
                for tensor, part in zip(group, parts, strict=True):
                    tensor.view(-1).copy_(part)

        return step

    def close(self) -> None:
        self._dist.destroy_process_group()
