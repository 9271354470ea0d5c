"""The standing graph: the pairs of ranks of a communicator that are always connected.

A rank is connected to the ranks at distances of a power of two in both directions,
modulo the number P of ranks. In a job with several hosts, it is also connected to all
ranks of its host, and to ranks with its position on other hosts, at distances of a
power of two between the hosts. So a rank has 2 log2(P) neighbours, or some more.

Nearly all schedules stay within the graph, so other pairs of ranks are connected only
when a call needs them (factory.py). Heartbeats use the graph (_native.Heartbeat): a
rank watches its neighbours and passes the loss of a rank on to them. A loss reaches all
ranks after log2(P) / 2 hops, and the graph stays connected if a sixteenth of the hosts
is lost. Bosilca et al., "Failure detection and propagation in HPC systems", SC 2016,
use the same graph.
"""

from __future__ import annotations

from collections.abc import Sequence


def neighbours(rank: int, hosts: Sequence[int]) -> list[int]:
    """Returns the ranks to which a rank is always connected, in increasing order.

    Args:
        rank: the rank, within the communicator.
        hosts: the number of the host of each rank.

    Example:
        >>> neighbours(0, [0, 1, 2, 3, 4, 5, 6, 7, 8])
        [1, 2, 4, 5, 7, 8]
        >>> neighbours(4, [0, 0, 0, 1, 1, 1, 2, 2, 2])
        [0, 1, 2, 3, 5, 6, 7, 8]
        >>> len(neighbours(0, [0] * 256))
        15
    """
    found = set(_at_powers(rank, range(len(hosts))))
    if len(set(hosts)) == 1:
        return sorted(found - {rank})
    by_host: dict[int, list[int]] = {}
    for other, host in enumerate(hosts):
        by_host.setdefault(host, []).append(other)
    own = by_host[hosts[rank]]
    position = own.index(rank)
    lane = [ranks[position] for ranks in by_host.values() if position < len(ranks)]
    found.update(own, _at_powers(lane.index(rank), lane))
    return sorted(found - {rank})


def most_neighbours(size: int, on_host: int) -> int:
    """Returns a limit of the neighbours of a rank, which `neighbours` never exceeds.

    Args:
        size: the number of ranks.
        on_host: the number of ranks of its host.

    Example:
        >>> most_neighbours(4, 2), most_neighbours(4096, 8)
        (3, 55)
    """
    return min(size - 1, 4 * (size - 1).bit_length() + on_host - 1)


def tree(index: int, size: int) -> tuple[list[int], list[int]]:
    """Returns the parent, if any, and the children in the binomial tree from index 0.

    The edges have a length that is a power of two, so that they are in the graph.

    Example:
        >>> tree(0, 6)
        ([], [1, 2, 4])
        >>> tree(5, 6)
        ([1], [])
    """
    top = 1 << index.bit_length()
    parent = [index - top // 2] if index else []
    steps = [1 << k for k in range(size.bit_length()) if 1 << k >= top]
    return parent, [index + step for step in steps if index + step < size]


def _at_powers(index: int, ranks: Sequence[int]) -> list[int]:
    """Returns the items of `ranks` at distances of a power of two from `index`."""
    found, distance = [], 1
    while distance < len(ranks):
        found += [ranks[(index + d) % len(ranks)] for d in (distance, -distance)]
        distance *= 2
    return found
