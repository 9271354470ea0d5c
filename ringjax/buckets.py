"""Which gradients travel together: a pure plan from shapes, dtypes and readiness.

No jax and no communication, so that it can be tested and simulated anywhere. Copying
leaves into the memory of a bucket is native; finding out the readiness is `optim.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Cuts = tuple[tuple[int, ...], ...]


def plan(
    avals: Sequence[tuple[Sequence[int], Any]],
    bucket_bytes: int,
    order: Sequence[int] | None = None,
) -> Cuts:
    """Cuts leaves into buckets that can be sent as soon as their leaves exist.

    Args:
      avals: (shape, dtype) of every leaf.
      bucket_bytes: the size that a bucket of more than one leaf does not exceed.
      order: the indices of the leaves, first ready first. None: reversed, because the
        backward pass reaches the last layer first.

    Returns:
      The indices of the leaves of each bucket. Every leaf is in one bucket, a bucket
      has one dtype, leaves in a bucket and buckets are in the order of readiness; a
      bucket is ready when the last of its leaves is.

    Raises:
      ValueError: `bucket_bytes` is below 1, or `order` is not a permutation.

    Example:
      >>> plan([((256,), "float32"), ((256,), "float32"), ((8,), "int32")], 1024)
      ((2,), (1,), (0,))
    """
    if bucket_bytes < 1:
        raise ValueError(f"`bucket_bytes` is {bucket_bytes}, expected at least 1")
    if order is None:
        order = range(len(avals))[::-1]
    if sorted(order) != list(range(len(avals))):
        raise ValueError(
            f"`order` is {list(order)}, expected every index below {len(avals)} once"
        )
    leaves = tuple((tuple(shape), np.dtype(dtype)) for shape, dtype in avals)
    return _plan(leaves, int(bucket_bytes), tuple(order))


@lru_cache(maxsize=256)
def _plan(
    leaves: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...],
    bucket_bytes: int,
    order: tuple[int, ...],
) -> Cuts:
    # One open bucket per dtype: leaves of two dtypes that alternate (weights in
    # bfloat16, norms in float32) must not make a bucket each.
    done: list[tuple[int, list[int]]] = []
    filling: dict[np.dtype[Any], tuple[int, int, list[int]]] = {}
    for place, index in enumerate(order):
        shape, dtype = leaves[index]
        size = math.prod(shape) * dtype.itemsize
        if dtype in filling:
            last, filled, members = filling[dtype]
            if filled + size <= bucket_bytes:
                members.append(index)
                filling[dtype] = (place, filled + size, members)
                continue
            done.append((last, members))
        filling[dtype] = (place, size, [index])
    done += [(last, members) for last, _, members in filling.values()]
    return tuple(tuple(members) for _, members in sorted(done))
