"""Result memory: large results in blocks that are used again.

The kernel gives new memory as pages of zeros, one page fault at a time. For a result of
64 MiB that takes as long as the broadcast itself. So a block returns to this module
when the last array on it is gone, and the next result of the same size uses it.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LEAST = 1 << 20  # bytes of a result; malloc itself keeps smaller blocks
_MOST_FREE = 256 << 20  # bytes of all free blocks

_free: list[mmap.mmap] = []  # the latest last
# No thread waits for this lock, because new memory always serves. Waiting could cause a
# deadlock in a finalizer, which may interrupt the thread that holds the lock, and in a
# forked child, where that thread does not exist.
_lock = threading.Lock()


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns an array with arbitrary contents, as `np.empty` does."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST:
        return np.empty(shape, dtype)
    block = _take(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    array = np.frombuffer(block, np.uint8)
    # A view of an array that does not own its memory refers to that array, so the array
    # lives as long as any view of it.
    weakref.finalize(array, _give_back, block).atexit = False
    return array[:size].view(dtype).reshape(shape)


def _take(size: int) -> mmap.mmap:
    if _lock.acquire(blocking=False):
        try:
            for i in reversed(range(len(_free))):
                if len(_free[i]) == size:
                    return _free.pop(i)
        finally:
            _lock.release()
    return mmap.mmap(-1, size)


def _give_back(block: mmap.mmap) -> None:
    if len(block) <= _MOST_FREE and _lock.acquire(blocking=False):
        try:
            _free.append(block)
            excess = free_bytes() - _MOST_FREE
            while excess > 0:
                excess -= len(_free.pop(0))
        finally:
            _lock.release()


def free_bytes() -> int:
    """Returns the bytes that wait for the next result."""
    return sum(len(block) for block in _free)
