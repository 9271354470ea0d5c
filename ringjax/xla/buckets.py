"""Which gradients travel together, and which at the same time: pure plans from sizes.

No jax and no communication, so that it can be tested and simulated anywhere. Copying
leaves into the memory of a bucket is native; finding out the readiness is `optim.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Cuts = tuple[tuple[int, ...], ...]

ALIGNMENT = 64  # of every leaf in the memory of a bucket; the native core has the same
MIN_CUT_BYTES = 1 << 18  # bytes of a bucket that are not worth cutting
# Tensors of one call: XLA's compile time grows with their square, in each call by
# itself. Some hundred, which most models have, are nothing beside the rest.
MAX_TENSORS = 512


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


def refine(cuts: Cuts, sizes: Sequence[int], most: int) -> Cuts:
    """Cuts buckets that cross a slow wire into smaller ones, the smaller the later.

    What is ready last has nothing left to hide behind, so a bucket takes no more than a
    quarter of the bytes that are still to come.

    Args:
      cuts: the indices of the leaves of each bucket, in the order of readiness.
      sizes: the bytes of each leaf.
      most: the bytes that a bucket of more than one leaf does not exceed.

    Example:
      >>> refine(((0, 1, 2, 3, 4, 5),), [4 << 20] * 5 + [1 << 20], 8 << 20)
      ((0,), (1,), (2,), (3,), (4,), (5,))
    """
    left, out = sum(sizes), []
    for cut in cuts:
        members: list[int] = []
        filled = 0
        for index in cut:
            limit = min(most, max(MIN_CUT_BYTES, (left + filled) // 4))
            if members and filled + sizes[index] > limit:
                out.append(tuple(members))
                members, filled = [], 0
            members.append(index)
            filled += sizes[index]
            left -= sizes[index]
        out.append(tuple(members))
    return tuple(out)


def packed_bytes(sizes: Sequence[int]) -> int:
    """The memory that leaves of these many bytes need between START and DONE."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def window(needs: Sequence[int], memory: float) -> tuple[list[tuple[str, int]], int]:
    """The order of the calls of overlapped buckets, so that `memory` is enough.

    A bucket is on its way from its START to its DONE. The oldest is waited for as late
    as possible: when the next one has no room, or at the end. A bucket that alone needs
    more than `memory` is reduced in place by a RUN, which waits.

    Args:
      needs: the bytes that each bucket needs on its way, in the order of readiness.
      memory: the most bytes on their way; infinity: all STARTs come before all DONEs.

    Returns:
      (call, bucket) in order, and the most bytes on their way at once.

    Example:
      >>> window([2, 2, 9, 2], 4)[0]
      [('start', 0), ('start', 1), ('run', 2), ('done', 0), ('start', 3), ('done', 1), \
('done', 3)]
    """
    calls: list[tuple[str, int]] = []
    started: list[int] = []
    held = most = 0
    for bucket, need in enumerate(needs):
        if need > memory:
            calls.append(("run", bucket))
            continue
        while held + need > memory:
            oldest = started.pop(0)
            held -= needs[oldest]
            calls.append(("done", oldest))
        calls.append(("start", bucket))
        started.append(bucket)
        held += need
        most = max(most, held)
    return [*calls, *(("done", bucket) for bucket in started)], most


def split_evenly(count: int, most: int = MAX_TENSORS) -> Cuts:
    """The indices below `count`, in order, as few as even pieces of at most `most`.

    Example:
      >>> split_evenly(5, most=2), split_evenly(0)
      (((0,), (1, 2), (3, 4)), ((),))
    """
    number = max(1, -(-count // most))
    ends = [count * i // number for i in range(number + 1)]
    return tuple(tuple(range(*pair)) for pair in itertools.pairwise(ends))


def plan_calls(
    sizes: Sequence[int],
    cuts: Cuts,
    memory: float,
    elastic_memory: int | None,
    overlapped: bool,
) -> tuple[Cuts, list[tuple[str, int]], int, bool]:
    """The buckets, the calls in order, the most bytes between START and DONE.

    And whether they are overlapped.

    Args:
      sizes: the bytes of each leaf.
      cuts: the indices of the leaves of each bucket, in the order of readiness.
      memory: the most bytes on their way; infinity for a device.
      elastic_memory: of an elastic job, where all leaves are reduced over the same
        ranks: all STARTs come before all DONEs, if this is enough for each bucket as it
        is and as a sum, so that all can run again. Else, and in place, there is one
        call. None: the job is not elastic.
      overlapped: False: calls that work in place, one after the other.

    Example:
      >>> plan_calls([8, 8], ((1,), (0,)), 1024, None, overlapped=False)
      (((0, 1),), [('run', 0)], 0, False)
    """
    on_device = memory == math.inf
    if elastic_memory is not None and not on_device:
        overlapped = overlapped and 2 * packed_bytes(sizes) <= elastic_memory
    whole = on_device or elastic_memory is not None
    if not overlapped:
        runs = split_evenly(len(sizes), (len(sizes) or 1) if whole else MAX_TENSORS)
        return runs, [("run", i) for i in range(len(runs))], 0, False
    if not on_device:
        cuts = tuple(
            tuple(cut[i] for i in p) for cut in cuts for p in split_evenly(len(cut))
        )
        # So that several are on their way at once.
        cuts = refine(cuts, sizes, int(memory) // 8)
    needs = [packed_bytes([sizes[i] for i in cut]) for cut in cuts]
    return (cuts, *window(needs, math.inf if whole else memory), True)
