"""The collectives of JAX arrays. Importing this package registers their primitives.

To add a collective, add a file to this package, with a function, rules and a primitive,
and an import below.
"""

from ringjax.collectives.allgather import allgather, grouped_allgather
from ringjax.collectives.allreduce import allreduce, grouped_allreduce
from ringjax.collectives.alltoall import alltoall, grouped_alltoall
from ringjax.collectives.barrier import barrier
from ringjax.collectives.broadcast import broadcast, grouped_broadcast
from ringjax.collectives.reducescatter import grouped_reducescatter, reducescatter

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_alltoall",
    "grouped_broadcast",
    "grouped_reducescatter",
    "reducescatter",
]
