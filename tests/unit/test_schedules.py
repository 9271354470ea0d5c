"""Schedules of all collectives, proved by the verifier for many sizes and layouts.

No socket, no process: schedules are data. Textbook numbers of steps, messages and
elements are asserted, and controls show that the verifier rejects broken schedules.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax import _native

Counts = list[list[int]]
Step = dict[str, Any]

ROWS: list[tuple[str, str]] = _native.algorithms()
SIZES = [*range(1, 18), 23, 32, 33]
REDUCTIONS = ("allreduce", "reducescatter")


def split(n: int, parts: int) -> list[int]:
    return [n // parts + (i < n % parts) for i in range(parts)]


def even_counts(op: str, size: int, n: int) -> Counts:
    """Problem.counts of every rank for n elements cut as evenly as possible."""
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
    if algorithm != "hierarchical":
        return True
    ranks = [host.count(h) for h in sorted(set(host))]
    several = 1 < len(ranks) < len(host)
    return several and (op != "allgather" or len(set(ranks)) == 1)


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
        _native.schedule(op, algorithm, rank, counts[rank], host, root)
        for rank in range(len(host))
    ]


def rejection(op: str, broken: list[list[Step]], counts: Counts, root: int = 0) -> str:
    """The verifier's reason to reject `broken`; fails if it does not."""
    report = _native.verify_schedules(op, broken, counts, [0] * len(broken), root)
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("op", "algorithm"), ROWS)
def test_every_algorithm_is_correct(op: str, algorithm: str, size: int) -> None:
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
        host = [0, 1, 1, 0]
    counts = data.draw(uneven_counts(op, len(host)))
    root = data.draw(st.integers(0, len(host) - 1)) if op == "broadcast" else 0
    prove(op, algorithm, counts, host, root)


def test_an_algorithm_that_does_not_apply_is_refused() -> None:
    report = _native.verify("allreduce", "hierarchical", [[4]] * 3, [0, 0, 0], 0)
    assert not report["ok"]
    assert "does not apply" in report["error"]


# Textbook numbers: n elements on P = `size` ranks of one host, unless said otherwise.

BIG = 1_000_003
MANY = [p for p in SIZES if p > 1]


def ceil_log2(n: int) -> int:
    return (n - 1).bit_length()


def power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def deepest(size: int) -> int:
    """Depth of a binomial tree: ceil(log2 P) rounds, but not all of them in a chain."""
    depth = max(r.bit_count() for r in range(size))
    assert ceil_log2(size) - 1 <= depth <= ceil_log2(size)
    return depth


def report_for(op: str, algorithm: str, size: int) -> dict[str, Any]:
    return prove(op, algorithm, even_counts(op, size, BIG), [0] * size)


@pytest.mark.parametrize("size", MANY)
@pytest.mark.parametrize(
    ("op", "rounds"), [("allreduce", 2), ("reducescatter", 1), ("allgather", 1)]
)
def test_ring_numbers(op: str, rounds: int, size: int) -> None:
    report = report_for(op, "ring", size)
    assert report["steps"] == rounds * (size - 1)
    assert max(report["messages"]) == rounds * (size - 1)
    assert max(report["sent"]) <= rounds * (size - 1) * math.ceil(BIG / size)
    assert sum(report["sent"]) == rounds * (size - 1) * BIG


@pytest.mark.parametrize("size", MANY)
@pytest.mark.parametrize(
    ("op", "rounds"), [("allreduce", 2), ("reducescatter", 1), ("allgather", 1)]
)
def test_direct_numbers(op: str, rounds: int, size: int) -> None:
    report = report_for(op, "direct", size)
    assert report["steps"] == rounds
    assert max(report["messages"]) == rounds * (size - 1)
    assert max(report["sent"]) <= rounds * (size - 1) * math.ceil(BIG / size)
    assert sum(report["sent"]) == rounds * (size - 1) * BIG


@pytest.mark.parametrize("size", MANY)
def test_halving_numbers(size: int) -> None:
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


@pytest.mark.parametrize("size", MANY)
def test_tree_numbers(size: int) -> None:
    depth = deepest(size)
    report = report_for("broadcast", "tree", size)
    assert report["steps"] == depth
    assert max(report["messages"]) == report["messages"][0] == ceil_log2(size)
    assert sum(report["sent"]) == (size - 1) * BIG

    report = report_for("allreduce", "tree", size)
    assert report["steps"] == 2 * depth
    assert max(report["messages"]) == ceil_log2(size)
    assert sum(report["sent"]) == 2 * (size - 1) * BIG


@pytest.mark.parametrize("size", MANY)
def test_double_tree_numbers(size: int) -> None:
    report = report_for("allreduce", "double_tree", size)
    assert report["steps"] <= 2 * ceil_log2(size)
    assert max(report["messages"]) <= 4
    assert max(report["sent"]) <= 4 * math.ceil(BIG / 2)
    assert sum(report["sent"]) == 2 * (size - 1) * BIG


@pytest.mark.parametrize("size", MANY)
def test_bruck_numbers(size: int) -> None:
    report = report_for("allgather", "bruck", size)
    assert report["steps"] == deepest(size)
    assert max(report["messages"]) <= 2 * ceil_log2(size)
    assert sum(report["sent"]) == (size - 1) * BIG


@pytest.mark.parametrize("size", MANY)
def test_direct_broadcast_and_alltoall_numbers(size: int) -> None:
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
    """Elements that leave each host."""
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

    counts = even_counts("allgather", len(host), n)
    report = prove("allgather", "hierarchical", counts, host)
    assert report["steps"] == 1 + (hosts - 1)
    leaving = (hosts - 1) * n // hosts
    assert crossing("allgather", "hierarchical", n, host) == [leaving] * hosts


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


@pytest.mark.parametrize(("op", "algorithm"), ROWS)
def test_one_rank_copies_and_scales_once(op: str, algorithm: str) -> None:
    if algorithm == "hierarchical":
        host = [0, 0, 1, 1]  # needs hosts; its local copies are covered elsewhere
        assert not applies(op, algorithm, [0])
        prove(op, algorithm, even_counts(op, 4, 7), host)
        return
    (step,) = _native.schedule(op, algorithm, 0, even_counts(op, 1, 7)[0], [0], 0)
    assert (step["kind"], step["first"], step["last"]) == ("copy", True, True)
    assert step["src"] == ("in", 0, 7)
    assert step["dst"] == ("out", 0, 7)
    assert _native.schedule(op, algorithm, 0, even_counts(op, 1, 0)[0], [0], 0) == []


@pytest.mark.parametrize(
    ("op", "algorithm"),
    [row for row in ROWS if row[1] not in ("halving", "bruck")],
)
def test_what_is_passed_on_came_in_one_message(op: str, algorithm: str) -> None:
    """So that the executor can forward a message while it is still coming in."""
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


# Controls: schedules that must be rejected.


def drop(steps: list[Step], i: int) -> None:
    del steps[i]


def flip_first(steps: list[Step], i: int) -> None:
    steps[i]["first"] = not steps[i]["first"]


def flip_last(steps: list[Step], i: int) -> None:
    steps[i]["last"] = not steps[i]["last"]


def shift_dst(steps: list[Step], i: int) -> None:
    region, offset, count = steps[i]["dst"]
    steps[i]["dst"] = (region, offset + 1, count)


def shift_src(steps: list[Step], i: int) -> None:
    region, offset, count = steps[i]["src"]
    steps[i]["src"] = (region, offset + 1, count)


def shrink(steps: list[Step], i: int) -> None:
    for name in ("src", "dst"):
        region, offset, count = steps[i][name]
        steps[i][name] = (region, offset, max(0, count - 1))


def write_to_input(steps: list[Step], i: int) -> None:
    steps[i]["dst"] = ("in", *steps[i]["dst"][1:])


READS = {"send", "recv_reduce", "copy"}
WRITES = {"recv", "recv_reduce", "copy"}
BREAKAGES: list[tuple[Callable[[list[Step], int], None], set[str]]] = [
    (drop, READS | WRITES),
    (flip_first, READS),
    (flip_last, {"recv_reduce", "copy"}),
    (shift_dst, WRITES),
    (shift_src, READS),
    (shrink, READS | WRITES),
    (write_to_input, WRITES),
]


@pytest.mark.parametrize(("breakage", "kinds"), BREAKAGES)
@pytest.mark.parametrize(
    ("op", "algorithm"), [row for row in ROWS if row[0] in REDUCTIONS]
)
def test_any_broken_step_is_noticed(
    op: str,
    algorithm: str,
    breakage: Callable[[list[Step], int], None],
    kinds: set[str],
) -> None:
    size = 6
    host = [r // 3 for r in range(size)]
    counts = even_counts(op, size, 40)
    good = schedules(op, algorithm, counts, host)
    assert _native.verify_schedules(op, good, counts, host, 0)["ok"]
    broken = 0
    for rank in range(size):
        for i, step in enumerate(good[rank]):
            if step["kind"] in kinds:
                bad = copy.deepcopy(good)
                breakage(bad[rank], i)
                rejection(op, bad, counts)
                broken += 1
    assert broken > 0 or kinds == {"copy"}


def make(kind: str, peer: int = -1, **fields: Any) -> Step:
    empty = ("out", 0, 0)
    step = {"kind": kind, "peer": peer, "dst": empty, "src": empty}
    return {**step, "first": False, "last": False, **fields}


IN, OUT = ("in", 0, 3), ("out", 0, 3)


def test_results_that_each_rank_rounds_by_itself_are_rejected() -> None:
    """Plain recursive doubling: right sums, but not the same bits everywhere."""
    swap = [
        [
            make("send", other, src=IN, first=True),
            make("recv_reduce", other, dst=OUT, src=IN, first=True, last=True),
        ]
        for other in (1, 0)
    ]
    assert "finished twice" in rejection("allreduce", swap, [[3], [3]])


def test_a_contribution_that_counts_twice_is_rejected() -> None:
    steps = [
        [
            make("recv_reduce", 1, dst=OUT, src=IN, first=True),
            make("recv_reduce", 1, dst=OUT, src=OUT, last=True),
            make("send", 1, src=OUT),
        ],
        [
            make("send", 0, src=IN, first=True),
            make("send", 0, src=IN, first=True),
            make("recv", 0, dst=OUT),
        ],
    ]
    assert "twice" in rejection("allreduce", steps, [[3], [3]])


def test_a_deadlock_is_rejected() -> None:
    wait = [
        [make("recv", other, dst=OUT), make("send", other, src=OUT)] for other in (1, 0)
    ]
    reason = rejection("allreduce", wait, [[3], [3]])
    assert reason.startswith("deadlock; rank 0, step 0 (recv from 1")
    assert "rank 1, step 0 (recv from 0" in reason


def test_what_only_works_with_two_buffers_is_rejected() -> None:
    """A root that copies, and then sends what the copy overwrote."""
    steps = [
        [
            make("copy", dst=OUT, src=IN, first=True, last=True),
            make("send", 1, src=IN, first=True),
        ],
        [make("recv", 0, dst=OUT)],
    ]
    assert "in and out are one" in rejection("broadcast", steps, [[3], [3]])
    steps[0].reverse()
    assert _native.verify_schedules("broadcast", steps, [[3], [3]], [0, 0], 0)["ok"]


def test_blocks_in_the_wrong_place_are_rejected() -> None:
    counts = [[3, 3], [3, 3]]
    good = schedules("allgather", "direct", counts, [0, 0])
    for step in good[1]:
        if step["dst"][2] > 0:
            step["dst"] = ("out", 3 - step["dst"][1], 3)
    assert "wrong contributions" in rejection("allgather", good, counts)


def test_ranks_that_disagree_are_rejected() -> None:
    steps: list[list[Step]] = [[], []]
    assert "disagree" in rejection("allreduce", steps, [[3], [4]])
    counts = [[0, 1, 0, 0], [0, 0, 2, 0]]
    assert "does not send" in rejection("alltoall", steps, counts)
    assert "root 2" in rejection("broadcast", steps, [[3], [3]], root=2)
    assert "expected 2" in rejection("allgather", steps, [[3], [3]])
