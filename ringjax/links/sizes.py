"""How large rings and tiles are: smaller ones where many ranks share a host.

What is decided here is alike on all ranks of a host.
"""

from __future__ import annotations

from collections.abc import Callable

_MOST = 32 << 20  # bytes of rings, and of a shared segment, that a rank maps
_MOST_OF_HOST = 512 << 20  # bytes of all rings that one communicator has on a host


def ring(wanted: int, ranks: int, memory: Callable[[int], int]) -> int:
    """The bytes of each ring.

    Args:
        ranks: of the communicator, on this host.
        memory: the bytes that a pair of ranks needs with such rings.

    Example:
        >>> [ring(1 << 20, n, lambda ring: 2 * ring) >> 10 for n in (2, 32, 64, 256)]
        [1024, 512, 128, 8]
    """
    others = ranks - 1
    while wanted > 1 << 16 and 2 * others * wanted > _MOST:
        wanted //= 2
    # The number of pairs grows with the square of the ranks, the memory must not.
    pairs = ranks * others // 2
    while wanted > 1 << 12 and pairs * memory(wanted) > _MOST_OF_HOST:
        wanted //= 2
    return wanted


def tile(wanted: int, ranks: int, memory: Callable[[int, int], int]) -> int:
    """The bytes of each tile; `memory` gives those of a shared segment."""
    while wanted > 1 << 16 and memory(ranks, wanted) > _MOST:
        wanted = wanted // 2 & -4096
    return wanted
