"""Nearly all schedules stay within the standing graph, so calls connect no other pairs.

A schedule that leaves the graph connects ranks in the middle of a job, over TCP. So a
new row of the table must stay within the graph, or have an entry below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from ringjax import _native
from ringjax.links.standing import neighbours

# All sizes up to 64, and some larger ones: powers of two, their neighbours, and others.
SIZES = [*range(2, 65), 96, 127, 128, 129, 300]
RANKS_PER_HOST = (1, 4, 6, 8)
# Rows in which ranks exchange data with all others. `direct` is for at most 32 ranks on
# several hosts; ranks of one host exchange data in their memory, without connections.
WIDE = ("direct", "pairwise", "shared")
MOST_DIRECT = 32


@dataclass(frozen=True)
class Case:
    """Ranks on hosts that are full except the last, and the root of a broadcast."""

    size: int
    per_host: int
    root: int

    @property
    def hosts(self) -> list[int]:
        return [rank // self.per_host for rank in range(self.size)]

    @property
    def root_is_first(self) -> bool:
        """Whether the root is the first rank of its host."""
        return self.root % self.per_host == 0


def is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


# The rows that leave the graph in the cases that the function accepts, and the largest
# number of partners of a rank outside of the graph.
EXCEPTIONS: dict[tuple[str, str], tuple[int, Callable[[Case], bool]]] = {
    ("allreduce", "halving"): (4, lambda case: not is_power_of_two(case.size)),
    ("reducescatter", "halving"): (4, lambda case: not is_power_of_two(case.size)),
    ("allreduce", "hierarchical_halving"): (
        4,
        lambda case: not is_power_of_two(case.hosts[-1] + 1),
    ),
    ("broadcast", "hierarchical"): (6, lambda case: not case.root_is_first),
    ("broadcast", "chain"): (1, lambda case: not case.root_is_first),
}
# In an alltoall, the ranks with one place on their hosts exchange data with each other.
WIDE_ROWS = [("alltoall", "hierarchical")]
ROWS = [
    row for row in _native.algorithms() if row[1] not in WIDE and row not in WIDE_ROWS
]


def cases(op: str) -> Iterator[Case]:
    # A rank has P log2(P) / 2 steps in an alltoall, so 300 ranks would take seconds.
    for size in SIZES[:-1] if op == "alltoall" else SIZES:
        for per_host in sorted({p for p in RANKS_PER_HOST if p < size} | {size}):
            for root in {0, size // 2, size - 1} if op == "broadcast" else {0}:
                yield Case(size, per_host, root)


def counts(op: str, size: int) -> list[list[int]]:
    if op in ("allreduce", "broadcast"):
        return [[3 * size]] * size
    if op == "alltoall":
        return [[3] * 2 * size] * size
    return [[3] * size] * size


def partners_outside(op: str, algorithm: str, case: Case) -> int:
    """Returns the largest number of partners of a rank outside of the graph."""
    hosts, sent = case.hosts, counts(op, case.size)
    most = 0
    for rank in range(case.size):
        steps = _native.schedule(op, algorithm, rank, sent, hosts, case.root)
        partners = {step["peer"] for step in steps if step["kind"] != "copy"}
        most = max(most, len(partners.difference(neighbours(rank, hosts))))
    return most


@pytest.mark.parametrize(("op", "algorithm"), ROWS)
def test_schedules_stay_within_the_standing_graph(op: str, algorithm: str) -> None:
    limit, leaves = EXCEPTIONS.get((op, algorithm), (0, lambda case: False))
    most = 0
    for case in cases(op):
        if not _native.applies(op, algorithm, case.hosts):
            continue
        outside = partners_outside(op, algorithm, case)
        assert not outside or leaves(case), case
        most = max(most, outside)
    assert most == limit


@pytest.mark.parametrize("op", [op for op, name in ROWS if name == "ring"])
def test_many_ranks_of_several_hosts_are_not_connected_directly(op: str) -> None:
    for size in SIZES:
        for per_host in RANKS_PER_HOST:
            hosts = Case(size, per_host, 0).hosts
            few = size <= MOST_DIRECT or len(set(hosts)) == 1
            assert _native.applies(op, "direct", hosts) == few
