"""Named operations on arrays of any framework, outside of compiled programs.

Each rank submits its tensors by name, in any order and from any thread. The native core
runs an operation when all ranks have submitted the operation. The ranks may use
different frameworks: a JAX array on one rank and a PyTorch tensor on another are one
operation if they have the same name, even if one rank uses `ringjax.torch`. This
package imports no framework.
"""

from __future__ import annotations

from ringjax.eager.handle import Handle, poll, synchronize
from ringjax.eager.lane import join
from ringjax.eager.movement import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_async,
    grouped_allgather,
    grouped_allgather_async,
)
from ringjax.eager.objects import allgather_object, broadcast_object
from ringjax.eager.reductions import (
    allreduce,
    allreduce_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)

__all__ = [
    "Handle",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]
