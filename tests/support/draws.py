"""Random inputs of collectives, which every rank can compute for all ranks. No jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def draw(
    size: int,
    shape: tuple[int, ...] | Callable[[int], tuple[int, ...]],
    dtype: str = "float32",
    seed: int = 0,
) -> list[np.ndarray]:
    """Draws an array for each rank; `shape` may be a function of the rank.

    The values are small integers or halves of integers, so sums and products of a few
    values are exact in every dtype.
    """
    out = []
    for rank in range(size):
        rng = np.random.default_rng((seed, rank))
        dims = shape(rank) if callable(shape) else shape
        if dtype == "bool":
            values = rng.integers(0, 2, dims)
        elif "int" in dtype:
            values = rng.integers(0 if dtype[0] == "u" else -4, 5, dims)
        else:
            values = rng.integers(-4, 5, dims) / 2
            if "complex" in dtype:
                values = values + 1j * rng.integers(-4, 5, dims) / 2
        out.append(np.asarray(values).astype(dtype_of(dtype)))
    return out
