"""Computes the sizes of ring buffers and tiles: smaller if many ranks share a host.

All ranks of a host compute the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable

_MAX_MAPPED = 32 << 20  # bytes of ring buffers, or of a shared segment, for one rank
_MAX_ON_HOST = 512 << 20  # bytes of all ring buffers of a communicator on one host


def ring_bytes(wanted: int, ranks: int, memory: Callable[[int], int]) -> int:
    """Computes the size of a ring buffer, which is at most the setting `wanted`.

    Args:
        ranks: the number of ranks of the communicator on this host.
        memory: a function that returns the bytes that a pair of ranks needs for ring
            buffers of a given size.

    Example:
        >>> def memory(ring: int) -> int:
        ...     return 2 * ring
        >>> [ring_bytes(1 << 20, n, memory) >> 10 for n in (2, 32, 64, 256)]
        [1024, 512, 128, 8]
    """
    peers = ranks - 1
    while wanted > 1 << 16 and 2 * peers * wanted > _MAX_MAPPED:
        wanted //= 2
    # Limit the memory of all pairs, because there are about ranks**2 / 2 pairs.
    pairs = ranks * peers // 2
    while wanted > 1 << 12 and pairs * memory(wanted) > _MAX_ON_HOST:
        wanted //= 2
    return wanted


def tile_bytes(wanted: int, ranks: int, memory: Callable[[int, int], int]) -> int:
    """Computes the size of a tile, which is at most the setting `wanted`.

    `memory` returns the bytes of a shared segment, given the number of ranks and the
    size of a tile. All ranks are on this host.
    """
    while wanted > 1 << 16 and memory(ranks, wanted) > _MAX_MAPPED:
        wanted = wanted // 2 & -4096
    return wanted
