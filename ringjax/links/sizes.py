"""Computes the sizes of ring buffers and tiles: smaller if many ranks share a host.

All ranks of a host compute the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable

# Computes the bytes of a host's memory that are allocated when it is created, and all
# its bytes, from the numbers of ranks, of bytes of a ring, and of bytes of a tile or 0.
HostBytes = Callable[[int, int, int], tuple[int, int]]

_MAX_SEGMENT = 32 << 20  # bytes of a shared segment
_MAX_MAPPED = 32 << 20  # bytes of the ring buffers of one rank
_MAX_ON_HOST = 512 << 20  # bytes of all ring buffers of a communicator on one host


def ring_bytes(wanted: int, ranks: int, host_bytes: HostBytes) -> int:
    """Computes the size of a ring buffer, which is at most the setting `wanted`.

    `ranks` is the number of ranks of the communicator on this host.

    Example:
        >>> def host_bytes(ranks: int, ring: int, tile: int) -> tuple[int, int]:
        ...     return 0, ranks * (ranks - 1) * ring
        >>> [ring_bytes(1 << 20, n, host_bytes) >> 10 for n in (2, 32, 64, 256)]
        [1024, 512, 128, 8]
    """
    while wanted > 1 << 16 and 2 * (ranks - 1) * wanted > _MAX_MAPPED:
        wanted //= 2
    # Limit the memory of all pairs, because an alltoall needs about ranks**2 / 2 pairs.
    while wanted > 1 << 12 and host_bytes(ranks, wanted, 0)[1] > _MAX_ON_HOST:
        wanted //= 2
    return wanted


def tile_bytes(wanted: int, ranks: int, host_bytes: HostBytes) -> int:
    """Computes the size of a tile, which is at most the setting `wanted`.

    `ranks` is the number of ranks of the communicator on this host.
    """
    while wanted > 1 << 16 and host_bytes(ranks, 1 << 12, wanted)[0] > _MAX_SEGMENT:
        wanted = wanted // 2 & -4096
    return wanted
