"""Tests of the schedules of all collectives, for many sizes and layouts of hosts.

Schedules are data, so the verifier proves them without sockets and processes. The tests
also compare numbers of steps, messages and elements with textbooks. test_verifier.py
checks that the verifier rejects wrong schedules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax import _native

Counts = list[list[int]]
Step = dict[str, Any]

ROWS: list[tuple[str, str]] = _native.algorithms()
ON_ONE_HOST = ("shared",)
SIZES = [*range(1, 18), 23, 32, 33]


def split(n: int, parts: int) -> list[int]:
    return [n // parts + (i < n % parts) for i in range(parts)]


def even_counts(op: str, size: int, n: int) -> Counts:
    """Returns the `counts` of each rank for n elements split as evenly as possible."""
    if op in ("allreduce", "broadcast"):
        return [[n]] * size
    if op == "alltoall":
        return matrix_counts([split(n, size)] * size)
    return [split(n, size)] * size


def matrix_counts(sent: list[list[int]]) -> Counts:
    return [row + [other[i] for other in sent] for i, row in enumerate(sent)]


def layouts(size: int) -> Iterator[list[int]]:
    yield [0] * size
    if size > 1:
        yield list(range(size))
    if size > 2:
        yield [0] + [1] * (size - 1)
        yield [r % 2 for r in range(size)]
        yield [r // 3 for r in range(size)]
    if size > 3 and size % 2 == 0:
        yield [r // (size // 2) for r in range(size)]
        yield [r % (size // 2) for r in range(size)]


def applies(op: str, algorithm: str, host: list[int]) -> bool:
    if algorithm in ON_ONE_HOST:
        return len(set(host)) == 1
    if (op, algorithm) == ("alltoall", "bruck"):
        return len(set(host)) > 1
    if algorithm == "direct":
        return len(host) <= 32 or len(set(host)) == 1
    if not algorithm.startswith("hierarchical"):
        return True
    ranks = [host.count(h) for h in sorted(set(host))]
    several = 1 < len(ranks) < len(host)
    needs_even = op in ("allgather", "reducescatter", "alltoall")
    needs_even |= algorithm == "hierarchical_shared"
    return several and (not needs_even or len(set(ranks)) == 1)


def prove(
    op: str, algorithm: str, counts: Counts, host: list[int], root: int = 0
) -> dict[str, Any]:
    report: dict[str, Any] = _native.verify(op, algorithm, counts, host, root)
    assert report["ok"], (op, algorithm, counts, host, root, report["error"])
    return report


def schedules(
    op: str, algorithm: str, counts: Counts, host: list[int], root: int = 0
) -> list[list[Step]]:
    return [
        _native.schedule(op, algorithm, rank, counts, host, root)
        for rank in range(len(host))
    ]


def rejection(op: str, broken: list[list[Step]], counts: Counts, root: int = 0) -> str:
    """Returns the verifier's reason to reject `broken`. Fails if it accepts."""
    report = _native.verify_schedules(op, broken, counts, root)
    assert not report["ok"], "the verifier accepted a broken schedule"
    reason: str = report["error"]
    assert reason
    return reason


def test_every_op_has_algorithms() -> None:
    assert len(set(ROWS)) == len(ROWS)
    assert {op for op, _ in ROWS} == {
        "allreduce",
        "allgather",
        "broadcast",
        "reducescatter",
        "alltoall",
    }


@pytest.mark.parametrize(("op", "algorithm"), ROWS)
def test_every_algorithm_is_correct(op: str, algorithm: str) -> None:
    for size in SIZES:
        for host in layouts(size):
            if not applies(op, algorithm, host):
                continue
            for n in {0, 1, size - 1, size, size + 1, 1_000_003}:
                for root in {0, size // 2, size - 1} if op == "broadcast" else {0}:
                    prove(op, algorithm, even_counts(op, size, n), host, root)


@pytest.mark.parametrize("algorithm", [name for op, name in ROWS if op == "broadcast"])
def test_broadcast_from_every_root(algorithm: str) -> None:
    for size in range(1, 10):
        for host in layouts(size):
            if applies("broadcast", algorithm, host):
                for root in range(size):
                    prove("broadcast", algorithm, [[29]] * size, host, root)


def uneven_counts(op: str, size: int) -> st.SearchStrategy[Counts]:
    one = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 2**40))
    row = st.lists(one, min_size=size, max_size=size)
    if op == "alltoall":
        rows = st.lists(row, min_size=size, max_size=size)
        return rows.map(matrix_counts)
    if op in ("allreduce", "broadcast"):
        return one.map(lambda n: [[n]] * size)
    return row.map(lambda counts: [counts] * size)


@pytest.mark.parametrize(("op", "algorithm"), ROWS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_uneven_counts_on_any_hosts(
    op: str, algorithm: str, data: st.DataObject
) -> None:
    host = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    if not applies(op, algorithm, host):
        host = [0] * len(host) if algorithm in ON_ONE_HOST else [0, 1, 1, 0]
    counts = data.draw(uneven_counts(op, len(host)))
    root = data.draw(st.integers(0, len(host) - 1)) if op == "broadcast" else 0
    prove(op, algorithm, counts, host, root)


@pytest.mark.parametrize(("op", "algorithm"), ROWS)
def test_where_algorithms_apply(op: str, algorithm: str) -> None:
    for size in SIZES:
        for host in layouts(size):
            assert _native.applies(op, algorithm, host) == applies(op, algorithm, host)


def test_an_algorithm_that_does_not_apply_is_refused() -> None:
    report = _native.verify("allreduce", "hierarchical", [[4]] * 3, [0, 0, 0], 0)
    assert not report["ok"]
    assert "does not apply" in report["error"]


# Numbers from textbooks, for n elements on P = `size` ranks of one host by default.

BIG = 1_000_003
MANY = [p for p in SIZES if p > 1]


def ceil_log2(n: int) -> int:
    return (n - 1).bit_length()


def power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def deepest(size: int) -> int:
    """Returns the depth of a binomial tree.

    The depth may be less than the ceil(log2 P) rounds, because not all rounds depend on
    each other.
    """
    depth = max(r.bit_count() for r in range(size))
    assert ceil_log2(size) - 1 <= depth <= ceil_log2(size)
    return depth


def report_for(op: str, algorithm: str, size: int) -> dict[str, Any]:
    return prove(op, algorithm, even_counts(op, size, BIG), [0] * size)


@pytest.mark.parametrize(
    ("op", "rounds"), [("allreduce", 2), ("reducescatter", 1), ("allgather", 1)]
)
def test_ring_numbers(op: str, rounds: int) -> None:
    for size in MANY:
        report = report_for(op, "ring", size)
        assert report["steps"] == rounds * (size - 1)
        assert max(report["messages"]) == rounds * (size - 1)
        assert max(report["sent"]) <= rounds * (size - 1) * math.ceil(BIG / size)
        assert sum(report["sent"]) == rounds * (size - 1) * BIG


@pytest.mark.parametrize(
    ("op", "rounds"), [("allreduce", 2), ("reducescatter", 1), ("allgather", 1)]
)
def test_direct_numbers(op: str, rounds: int) -> None:
    for size in MANY:
        report = report_for(op, "direct", size)
        assert report["steps"] == rounds
        assert max(report["messages"]) == rounds * (size - 1)
        assert max(report["sent"]) <= rounds * (size - 1) * math.ceil(BIG / size)
        assert sum(report["sent"]) == rounds * (size - 1) * BIG


def test_halving_numbers() -> None:
    for size in MANY:
        power = power_below(size)
        folded = size - power
        report = report_for("allreduce", "halving", size)
        assert report["steps"] == 2 * ceil_log2(power) + (2 if folded else 0)
        assert sum(report["sent"]) == 2 * (power - 1) * BIG + 2 * folded * BIG
        if not folded:
            assert max(report["sent"]) <= 2 * (size - 1) * math.ceil(BIG / size)

        report = report_for("reducescatter", "halving", size)
        extra = report["steps"] - ceil_log2(power)
        assert extra in ((1, 2) if folded else (0,))
        if not folded:
            assert sum(report["sent"]) == (size - 1) * BIG


def test_tree_numbers() -> None:
    for size in MANY:
        depth = deepest(size)
        report = report_for("broadcast", "tree", size)
        assert report["steps"] == depth
        assert max(report["messages"]) == report["messages"][0] == ceil_log2(size)
        assert sum(report["sent"]) == (size - 1) * BIG

        report = report_for("allreduce", "tree", size)
        assert report["steps"] == 2 * depth
        assert max(report["messages"]) == ceil_log2(size)
        assert sum(report["sent"]) == 2 * (size - 1) * BIG


def test_double_tree_numbers() -> None:
    for size in MANY:
        report = report_for("allreduce", "double_tree", size)
        assert report["steps"] <= 2 * ceil_log2(size)
        assert max(report["messages"]) <= 4
        assert max(report["sent"]) <= 4 * math.ceil(BIG / 2)
        assert sum(report["sent"]) == 2 * (size - 1) * BIG


def test_bruck_numbers() -> None:
    for size in MANY:
        report = report_for("allgather", "bruck", size)
        assert deepest(size) <= report["steps"] <= ceil_log2(size)
        assert max(report["messages"]) <= 2 * ceil_log2(size)
        assert sum(report["sent"]) == (size - 1) * BIG


def test_bruck_alltoall_numbers() -> None:
    for size in MANY:
        hosts = list(range(size))
        report = prove("alltoall", "bruck", [[BIG] * 2 * size] * size, hosts)
        assert deepest(size) <= report["steps"] <= ceil_log2(size)
        assert report["messages"] == [ceil_log2(size)] * size
        forwarded = BIG * sum(distance.bit_count() for distance in range(size))
        assert report["sent"] == [forwarded] * size


def test_direct_broadcast_and_alltoall_numbers() -> None:
    for size in MANY:
        report = report_for("broadcast", "direct", size)
        assert report["steps"] == min(size - 1, 2)
        assert max(report["sent"]) == report["sent"][0] == BIG
        assert sum(report["sent"]) == (size - 1) * BIG

        report = report_for("alltoall", "pairwise", size)
        assert report["steps"] == 1
        assert report["messages"] == [size - 1] * size
        kept = split(BIG, size)
        assert report["sent"] == [BIG - own for own in kept]


def crossing(op: str, algorithm: str, n: int, host: list[int]) -> list[int]:
    """Counts the elements that each host sends to other hosts."""
    out = [0] * len(set(host))
    steps = schedules(op, algorithm, even_counts(op, len(host), n), host)
    for rank, mine in enumerate(steps):
        for step in mine:
            if step["kind"] == "send" and host[step["peer"]] != host[rank]:
                out[host[rank]] += step["src"][2]
    return out


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (2, 4), (3, 4), (4, 2), (5, 3)])
def test_hierarchical_numbers_on_even_hosts(hosts: int, ranks: int) -> None:
    host = [r // ranks for r in range(hosts * ranks)]
    n = 12 * len(host)
    counts = even_counts("allreduce", len(host), n)
    report = prove("allreduce", "hierarchical", counts, host)
    assert report["steps"] == 2 + 2 * (hosts - 1)
    leaving = 2 * (hosts - 1) * n // hosts
    assert crossing("allreduce", "hierarchical", n, host) == [leaving] * hosts

    for op in ("allgather", "reducescatter"):
        report = prove(op, "hierarchical", even_counts(op, len(host), n), host)
        assert report["steps"] == 1 + (hosts - 1)
        leaving = (hosts - 1) * n // hosts
        assert crossing(op, "hierarchical", n, host) == [leaving] * hosts

    report = prove(
        "alltoall", "hierarchical", even_counts("alltoall", len(host), n), host
    )
    assert report["steps"] == 2
    leaving = ranks * n * (hosts - 1) // hosts
    assert crossing("alltoall", "hierarchical", n, host) == [leaving] * hosts


@pytest.mark.parametrize("root", [0, 3])
@pytest.mark.parametrize("host", [[0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2], [0, 1, 1, 1]])
def test_a_chain_crosses_each_link_once(host: list[int], root: int) -> None:
    n = 60
    report = prove("broadcast", "chain", [[n]] * len(host), host, root)
    assert report["steps"] == len(host) - 1
    assert max(report["sent"]) == n
    assert sum(crossing("broadcast", "chain", n, host)) == n * (len(set(host)) - 1)


@pytest.mark.parametrize("host", [[0, 0, 0, 1], [0, 1, 1, 2, 2, 2], [0, 1, 0, 0, 1]])
def test_hierarchical_numbers_on_uneven_hosts(host: list[int]) -> None:
    hosts, widest = len(set(host)), max(host.count(h) for h in host)
    n = 60
    report = prove("allreduce", "hierarchical", [[n]] * len(host), host)
    assert report["steps"] <= 2 * ceil_log2(widest) + 2 * (hosts - 1)
    leaving = 2 * (hosts - 1) * n // hosts
    assert crossing("allreduce", "hierarchical", n, host) == [leaving] * hosts

    report = prove("broadcast", "hierarchical", [[n]] * len(host), host)
    assert report["steps"] <= ceil_log2(hosts) + ceil_log2(widest)
    assert sum(crossing("broadcast", "hierarchical", n, host)) == (hosts - 1) * n


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (4, 2), (8, 2), (16, 3)])
def test_halving_between_hosts_has_a_logarithm_of_steps(hosts: int, ranks: int) -> None:
    n = 12 * hosts * ranks
    for host in (
        [r // ranks for r in range(hosts * ranks)],
        [0, *range(hosts)],  # uneven: leaders
    ):
        widest = max(host.count(h) for h in host)
        report = prove("allreduce", "hierarchical_halving", [[n]] * len(host), host)
        assert report["steps"] <= 2 * ceil_log2(widest) + 2 * ceil_log2(hosts)
        leaving = 2 * (hosts - 1) * n // hosts
        assert crossing("allreduce", "hierarchical_halving", n, host) == (
            [leaving] * hosts
        )


@pytest.mark.parametrize(("op", "algorithm"), ROWS)
def test_one_rank_copies_and_scales_once(op: str, algorithm: str) -> None:
    if algorithm.startswith("hierarchical"):
        host = [0, 0, 1, 1]  # hierarchical algorithms need several hosts
        assert not applies(op, algorithm, [0])
        prove(op, algorithm, even_counts(op, 4, 7), host)
        return
    (step,) = _native.schedule(op, algorithm, 0, even_counts(op, 1, 7), [0], 0)
    assert (step["kind"], step["first"], step["last"]) == ("copy", True, True)
    assert step["src"] == ("in", 0, 7)
    assert step["dst"] == ("out", 0, 7)
    assert _native.schedule(op, algorithm, 0, even_counts(op, 1, 0), [0], 0) == []


@pytest.mark.parametrize(
    ("op", "algorithm"),
    [row for row in ROWS if "halving" not in row[1] and row[1] != "bruck"],
)
def test_forwarded_data_arrives_in_one_message(op: str, algorithm: str) -> None:
    """This lets the executor forward a message while it is still arriving."""
    for size in range(2, 10):
        for host in layouts(size):
            if not applies(op, algorithm, host):
                continue
            for mine in schedules(op, algorithm, even_counts(op, size, 97), host):
                came: list[tuple[str, int, int]] = []
                for step in mine:
                    if step["kind"] in ("recv", "recv_reduce"):
                        came.append(step["dst"])
                    region, offset, count = step["src"]
                    if step["kind"] != "send" or region == "in":
                        continue
                    assert any(
                        region == r and o <= offset and offset + count <= o + c
                        for r, o, c in came
                    )
