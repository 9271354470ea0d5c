"""The inputs of a collective and its right results: small integers in float32.

Their sums are exact, so that results can be compared bit by bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def input_of(name: str, rank: int, size: int, count: int) -> Array:
    """Returns the input of a rank; `count` numbers are the whole vector."""
    own = count // size if name == "allgather" else count
    return _pattern(own) + np.float32(rank)


def expected(name: str, rank: int, size: int, count: int) -> Array:
    """Returns the right result of a rank; the root of a broadcast is rank 0."""
    pattern, ranks = _pattern(count), np.arange(size, dtype=np.float32)
    mine = slice(rank * (count // size), (rank + 1) * (count // size))
    if name == "broadcast":
        return pattern
    if name == "allgather":
        return np.concatenate([pattern[: count // size] + r for r in ranks])
    if name == "alltoall":
        return np.concatenate([pattern[mine] + r for r in ranks])
    total: Array = pattern * np.float32(size) + ranks.sum()
    return total[mine] if name == "reducescatter" else total


def output_for(name: str, array: Array, right: Array) -> Array:
    """Returns `array` for the collectives in place, and a new array for the others."""
    return array if name in ("allreduce", "broadcast") else np.zeros_like(right)


def _pattern(count: int) -> Array:
    return np.arange(count, dtype=np.float32) % np.float32(7)
