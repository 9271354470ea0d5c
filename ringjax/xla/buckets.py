"""Plans which gradients are sent together, and which are in flight at the same time.

A *leaf* is one gradient of the model's tree, a *bucket* the leaves that one call sends.
The plans depend only on sizes. This module uses neither JAX nor communication, so it
can be tested and simulated anywhere. `optim.py` finds out the order in which gradients
become ready. The native core copies leaves into the memory of a bucket.

References:
    Li et al, PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
    VLDB 2020, arXiv:2006.15704 (buckets in the order of readiness, overlap)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Cuts = tuple[tuple[int, ...], ...]

# The alignment of each leaf in the memory of a bucket, as in the native core.
ALIGNMENT = 64
# `refine` never limits a bucket to fewer bytes than this, because the latency of more
# calls would cost more than overlap gains.
MIN_CUT_BYTES = 1 << 18
# The most tensors of one call. XLA's compile time grows with the square of the number
# of tensors in a call, but is still short for a few hundred, as in most models.
MAX_TENSORS = 512


def plan(
    avals: Sequence[tuple[Sequence[int], npt.DTypeLike]],
    bucket_bytes: int,
    order: Sequence[int] | None = None,
) -> Cuts:
    """Assigns leaves to buckets that can be sent as soon as their leaves are computed.

    Args:
        avals: the (shape, dtype) of each leaf.
        bucket_bytes: the most bytes of a bucket that has more than one leaf.
        order: the indices of the leaves in the order in which they become ready. With
            None, the last leaf is ready first, because the backward pass reaches the
            last layer first.

    Returns:
        The indices of the leaves of each bucket. Each leaf is in one bucket, and a
        bucket has one dtype. Buckets, and the leaves in a bucket, are in the order of
        readiness; a bucket is ready when its last leaf is ready.

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
    # Fill one bucket for each dtype at the same time. With a single open bucket, models
    # with alternating dtypes (weights in bfloat16, norms in float32) would have one
    # bucket per leaf.
    done: list[tuple[int, list[int]]] = []
    filling: dict[np.dtype[Any], tuple[int, int, list[int]]] = {}
    for position, index in enumerate(order):
        shape, dtype = leaves[index]
        size = math.prod(shape) * dtype.itemsize
        if dtype in filling:
            last, filled, members = filling[dtype]
            if filled + size <= bucket_bytes:
                members.append(index)
                filling[dtype] = (position, filled + size, members)
                continue
            done.append((last, members))
        filling[dtype] = (position, size, [index])
    done += [(last, members) for last, _, members in filling.values()]
    return tuple(tuple(members) for _, members in sorted(done))


def refine(cuts: Cuts, sizes: Sequence[int], most: int) -> Cuts:
    """Cuts buckets, for a slow network, into buckets that become smaller and smaller.

    After the last bucket, no computation remains that could hide its transfer. So a
    bucket with more than one leaf has at most a quarter of the bytes that are not sent
    yet, and at most `most` bytes.

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
    """Returns the bytes that leaves of these sizes occupy between START and DONE."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def window(needs: Sequence[int], memory: float) -> tuple[list[tuple[str, int]], int]:
    """Orders the calls of overlapped buckets so that `memory` suffices.

    Bucket i is in flight from its START to its DONE, and then needs ``needs[i]`` bytes.
    The DONE of the oldest bucket is as late as possible: at the end, or before the
    START of a bucket that does not fit into the memory. A bucket that alone needs more
    than `memory` is reduced in place by a RUN, a call that waits.

    Returns:
        The (call, bucket) pairs in order, and the most bytes in flight at one time.

    Example:
        >>> window([2, 2, 9, 2], 4)[0][:4]
        [('start', 0), ('start', 1), ('run', 2), ('done', 0)]
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
    """Splits the indices below `count` into few, equal parts of at most `most` each.

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
    """Plans the native calls of a training step.

    Args:
        sizes: the bytes of each leaf.
        cuts: the indices of the leaves of each bucket, in the order of readiness.
        memory: the most bytes in flight; infinity for a CUDA device.
        elastic_memory: the most bytes for buckets in an elastic job; pass None if the
            job is not elastic. After a loss, all buckets run again, over the remaining
            ranks. So all STARTs come before all DONEs, and each bucket needs two
            copies, its input and its sum. If `elastic_memory` is too small, one RUN
            replaces all calls.
        overlapped: if False, the calls are RUNs in place, one after another.

    Returns:
        The buckets; the (call, bucket) pairs in order; the most bytes in flight; and
        whether the calls overlap.

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
        # Make small buckets, so that several buckets are in flight at the same time.
        cuts = refine(cuts, sizes, int(memory) // 8)
    needs = [packed_bytes([sizes[i] for i in cut]) for cut in cuts]
    return (cuts, *window(needs, math.inf if whole else memory), True)
