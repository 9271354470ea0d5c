"""What is compared: one adapter per library, each as its users would call it.

An adapter turns a variant and tensor shapes into a blocking function. It runs in one
rank of its library's own world. When and how often it is called: worker.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Shapes = Sequence[tuple[int, ...]]
Operation = Callable[[], Any]
BUCKET_BYTES = 25 << 20  # what DistributedDataParallel takes


class Peer(Protocol):
    """One rank of one library. Only one of them is ever made in a process.

    Attributes:
      rank, size: of this process among the library's ranks.
      version: of the library and what it stands on.
      arrays: names of the variants for one array, summed; the first is the usual one.
      models: names of the variants for a list of gradients, averaged.
    """

    rank: int
    size: int
    version: str
    arrays: tuple[str, ...]
    models: tuple[str, ...]

    def __init__(self, rank: int, size: int, port: int) -> None: ...
    def total(self, value: float) -> float:
        """The sum of `value` over all ranks."""

    def operation(self, variant: str, shapes: Shapes) -> Operation:
        """A function that reduces tensors of these shapes and waits for the result."""

    def close(self) -> None:
        """Leaves the world in good order."""


class Ringjax(Peer):
    """ringjax: the core alone, and what a compiled program calls."""

    arrays = (
        "jit",
        "jit, donated",
        "allreduce_grads in jit, donated",
        "core, numpy in place",
    )
    models = (
        "allreduce_grads in jit",
        "allreduce_grads in jit, donated",
        "core, numpy in place",
    )

    def __init__(self, rank: int, size: int, port: int) -> None:
        import jax

        import ringjax
        from ringjax import _native, runtime

        ringjax.init()
        self.rank, self.size = ringjax.rank(), ringjax.size()
        self.version = f"{ringjax.__version__}, jax {jax.__version__}"
        self._communicator = runtime.communicator()
        self._allreduce = _native.COLLECTIVES["allreduce"]
        self._ops = _native.REDUCE_OPS

    def total(self, value: float) -> float:
        """Adds `value` of all ranks."""
        import jax.numpy as jnp

        import ringjax

        return float(ringjax.allreduce(jnp.float32(value), op=ringjax.Sum))

    def operation(self, variant: str, shapes: Shapes) -> Operation:
        """Makes the blocking function."""
        donated = (0, 1) if variant.endswith("donated") else ()
        if variant.startswith("core"):
            return self._core(shapes)
        return (self._gradients if "grads" in variant else self._array)(shapes, donated)

    def _core(self, shapes: Shapes) -> Operation:
        arrays = [np.zeros(s, np.float32) for s in shapes]
        op = self._ops["Sum" if len(arrays) == 1 else "Average"]
        return lambda: self._communicator.execute(self._allreduce, op, arrays, arrays)

    def _array(self, shapes: Shapes, donated: tuple[int, ...]) -> Operation:
        import jax
        import jax.numpy as jnp

        import ringjax

        step = jax.jit(
            lambda x: ringjax.allreduce(x, op=ringjax.Sum), donate_argnums=donated[:1]
        )
        return _loop(step, jnp.zeros(shapes[0], jnp.float32), bool(donated))

    def _gradients(self, shapes: Shapes, donated: tuple[int, ...]) -> Operation:
        import jax
        import jax.numpy as jnp

        import ringjax

        op = ringjax.Sum if len(shapes) == 1 else ringjax.Average
        transformation = ringjax.allreduce_grads(op)
        update = jax.jit(transformation.update, donate_argnums=donated)
        gradients = [jnp.zeros(s, jnp.float32) for s in shapes]
        held = [gradients, transformation.init(gradients)]

        def step() -> None:
            updates, held[1] = jax.block_until_ready(update(*held))
            if donated:
                held[0] = updates

        return step

    def close(self) -> None:
        """Leaves the world."""
        import ringjax

        ringjax.shutdown()


class JaxGloo(Peer):
    """jax.lax.psum over processes: XLA's own CPU collectives, on Gloo."""

    arrays = ("psum in jit", "psum in jit, donated")
    models = ("pmean of the tree in jit", "pmean of the tree in jit, donated")

    def __init__(self, rank: int, size: int, port: int) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.rank, self.size, self.version = rank, size, jax.__version__
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
        self._mesh = Mesh(np.array(jax.devices()), ("ranks",))
        self._spec = PartitionSpec("ranks")
        self._sharding = NamedSharding(self._mesh, self._spec)

    def _make(self, shape: tuple[int, ...], value: float = 0.0) -> Any:
        """An array with one row for each rank."""
        import jax

        row = np.full((1, *shape), value, np.float32)
        return jax.make_array_from_process_local_data(self._sharding, row)

    def _compile(self, function: Callable[[Any], Any], donated: bool) -> Any:
        import jax

        mapped = jax.shard_map(
            function, mesh=self._mesh, in_specs=self._spec, out_specs=self._spec
        )
        return jax.jit(mapped, donate_argnums=(0,) if donated else ())

    def total(self, value: float) -> float:
        """Adds `value` of all ranks."""
        import jax

        add = self._compile(lambda x: jax.lax.psum(x, "ranks"), False)
        out = add(self._make((1,), value))
        return float(np.asarray(out.addressable_shards[0].data)[0, 0])

    def operation(self, variant: str, shapes: Shapes) -> Operation:
        """Makes the blocking function."""
        import jax

        reduce = jax.lax.psum if variant.startswith("psum") else jax.lax.pmean
        donated = variant.endswith("donated")
        step = self._compile(lambda tree: reduce(tree, "ranks"), donated)
        return _loop(step, [self._make(s) for s in shapes], donated)

    def close(self) -> None:
        """Leaves the world."""
        import jax

        jax.distributed.shutdown()


def _loop(step: Callable[[Any], Any], start: Any, donated: bool) -> Operation:
    """Calls a compiled function on the same input, or on its own last output."""
    import jax

    held = [start]

    def once() -> None:
        out = jax.block_until_ready(step(held[0]))
        if donated:
            held[0] = out

    return once


class TorchGloo(Peer):
    """torch.distributed on Gloo; the gradients each by itself or in DDP's buckets."""

    arrays = ("all_reduce in place",)
    models = ("25 MiB buckets", "one by one, async")

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
        """Adds `value` of all ranks."""
        x = self._torch.full((1,), value)
        self._dist.all_reduce(x)
        return float(x[0])

    def operation(self, variant: str, shapes: Shapes) -> Operation:
        """Makes the blocking function."""
        tensors = [self._torch.zeros(s) for s in shapes]
        if variant in self.arrays:
            return lambda: self._dist.all_reduce(tensors[0])
        return self._buckets(tensors) if "buckets" in variant else self._each(tensors)

    def _each(self, tensors: list[Any]) -> Operation:
        def step() -> None:
            works = [self._dist.all_reduce(t, async_op=True) for t in tensors]
            for work, tensor in zip(works, tensors, strict=True):
                work.wait()
                tensor.div_(self.size)

        return step

    def _buckets(self, tensors: list[Any]) -> Operation:
        """Copies into flat buffers, reduces them and copies back, as DDP does."""
        groups: list[list[Any]] = [[]]
        for tensor in reversed(tensors):  # gradients are ready from the back
            if sum(t.nbytes for t in groups[-1]) + tensor.nbytes > BUCKET_BYTES:
                groups.append([])
            groups[-1].append(tensor)
        flats = [self._torch.empty(sum(t.numel() for t in g)) for g in groups]

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
        """Leaves the world."""
        self._dist.destroy_process_group()


class Mpi4py(Peer):
    """An MPI through mpi4py, in place on numpy arrays."""

    arrays = ("Allreduce in place",)
    models = ("Allreduce in place, one by one",)

    def __init__(self, rank: int, size: int, port: int) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        self.version = MPI.Get_library_version().split(",")[0].split("\n")[0]

    def total(self, value: float) -> float:
        """Adds `value` of all ranks."""
        return float(self._world.allreduce(value))

    def operation(self, variant: str, shapes: Shapes) -> Operation:
        """Makes the blocking function."""
        arrays = [np.zeros(s, np.float32) for s in shapes]
        averages = variant in self.models

        def step() -> None:
            for array in arrays:
                self._world.Allreduce(self._mpi.IN_PLACE, array)
                if averages:
                    array /= self.size

        return step

    def close(self) -> None:
        """Leaves the world."""
        self._mpi.Finalize()


# By the names of the command line; the module without which there is no such peer.
PEERS: dict[str, tuple[type[Peer], str]] = {
    "ringjax": (Ringjax, "ringjax"),
    "jax-gloo": (JaxGloo, "jax"),
    "torch-gloo": (TorchGloo, "torch"),
    "mpi4py": (Mpi4py, "mpi4py"),
}
