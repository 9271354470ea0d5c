"""Reductions, which combine the values of all ranks. Names and codes are Horovod's.

This module imports no framework, so that launchers and other tools may use the names.
"""

from __future__ import annotations

import enum

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum"]


class ReduceOp(enum.IntEnum):
    """A reduction. The values are the codes that Horovod uses."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

# Collectives of ringjax, and JAX's names of them.
_REDUCING = ("allreduce", "psum", "pmax", "pmin", "product")
_SPREADING = ("allgather", "reducescatter", "alltoall", "all_gather", "psum_scatter")


def bus_factor(collective: str, ranks: int) -> float:
    """Returns how many bytes the busiest link carries, at best, per byte of a tensor.

    Example:
        >>> bus_factor("allreduce", 4)
        1.5
    """
    if collective in _REDUCING:
        return 2 * (ranks - 1) / ranks
    if collective in _SPREADING:
        return (ranks - 1) / ranks
    return 1.0 if ranks > 1 else 0.0
