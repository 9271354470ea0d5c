"""The standing graph: few neighbours, short ways, and whole after losses."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence

import pytest

from ringjax.links.standing import most_neighbours, neighbours

LAYOUTS = [
    [0] * 2,
    [0] * 7,
    [0] * 256,
    [*range(5)],
    [*range(100)],
    [r // 8 for r in range(1000)],
    [r // 6 for r in range(1500)],
    [r % 12 for r in range(96)],
    [0, 0, 0, 1, 2, 2],
]


def hops(graph: Sequence[Sequence[int]], start: int, gone: Collection[int] = ()) -> int:
    """The largest distance from `start` to any rank that is not gone."""
    seen, latest, count = {start, *gone}, [start], 0
    while latest := [n for n in {n for r in latest for n in graph[r]} if n not in seen]:
        seen.update(latest)
        count += 1
    assert len(seen) == len(graph)
    return count


@pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: f"{len(hosts)}")
def test_few_neighbours_and_short_ways(hosts: list[int]) -> None:
    size = len(hosts)
    graph = [neighbours(rank, hosts) for rank in range(size)]
    for rank, found in enumerate(graph):
        assert rank not in found
        assert found == sorted(set(found))
        assert len(found) <= most_neighbours(size, hosts.count(hosts[rank]))
        assert all(rank in graph[other] for other in found)
        mates = [r for r in range(size) if hosts[r] == hosts[rank] and r != rank]
        if len(set(hosts)) > 1:
            assert set(mates) <= set(found)
        outside = len(set(found) - set(mates))
        assert outside <= 2 * math.log2(size) + 2 * math.log2(len(set(hosts)) + 1) + 1
    assert hops(graph, 0) <= math.log2(size) / 2 + 1


@pytest.mark.parametrize("seed", range(5))
def test_all_that_are_left_are_connected(seed: int) -> None:
    size, on_host = 512, 8
    hosts = [rank // on_host for rank in range(size)]
    graph = [neighbours(rank, hosts) for rank in range(size)]
    choice = random.Random(seed)
    some_hosts = choice.sample(range(size // on_host), 4)
    losses = [
        set(choice.sample(range(size), size // 10)),
        {r for r in range(size) if hosts[r] in some_hosts},
        {(r + seed * on_host) % size for r in range(16 * on_host)},
    ]
    for gone in losses:
        start = next(r for r in range(size) if r not in gone)
        assert hops(graph, start, gone) <= math.log2(size) / 2 + 2
