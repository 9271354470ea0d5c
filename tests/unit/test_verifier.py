"""Tests that the verifier rejects wrong schedules and names the reason.

Without these tests, a verifier that accepts everything would pass test_schedules.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from ringjax import _native

Counts = list[list[int]]
Step = dict[str, Any]


def schedules(
    op: str, algorithm: str, counts: Counts, host: list[int]
) -> list[list[Step]]:
    return [
        _native.schedule(op, algorithm, rank, counts, host, 0)
        for rank in range(len(host))
    ]


def rejection(op: str, broken: list[list[Step]], counts: Counts) -> str:
    """Returns the verifier's reason to reject `broken`. Fails if it accepts."""
    report = _native.verify_schedules(op, broken, counts, 0)
    assert not report["ok"], "the verifier accepted a broken schedule"
    reason: str = report["error"]
    assert reason
    return reason


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
    ("op", "algorithm"),
    [row for row in _native.algorithms() if row[0] in ("allreduce", "reducescatter")],
)
def test_a_change_of_any_step_is_rejected(
    op: str,
    algorithm: str,
    breakage: Callable[[list[Step], int], None],
    kinds: set[str],
) -> None:
    size = 6
    host = [r // 3 for r in range(size)]
    counts = [[40]] * size if op == "allreduce" else [[7, 6, 8, 5, 7, 7]] * size
    good = schedules(op, algorithm, counts, host)
    assert _native.verify_schedules(op, good, counts, 0)["ok"]
    broken = 0
    for rank in range(size):
        for i, step in enumerate(good[rank]):
            if step["kind"] in kinds:
                bad = copy.deepcopy(good)
                breakage(bad[rank], i)
                rejection(op, bad, counts)
                broken += 1
    assert broken > 0


def make(kind: str, peer: int = -1, **fields: Any) -> Step:
    empty = ("out", 0, 0)
    step = {"kind": kind, "peer": peer, "dst": empty, "src": empty}
    return {**step, "first": False, "last": False, **fields}


IN, OUT = ("in", 0, 3), ("out", 0, 3)


def test_results_that_each_rank_rounds_by_itself_are_rejected() -> None:
    """Plain recursive doubling has right sums, but ranks may differ in the last bit."""
    swap = [
        [
            make("send", other, src=IN, first=True),
            make("recv_reduce", other, dst=OUT, src=IN, first=True, last=True),
        ]
        for other in (1, 0)
    ]
    assert "finished twice" in rejection("allreduce", swap, [[3], [3]])


def test_a_duplicate_contribution_is_rejected() -> None:
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


def test_a_schedule_that_needs_two_buffers_is_rejected() -> None:
    """The root copies its input, and then sends the input, which may be overwritten."""
    steps = [
        [
            make("copy", dst=OUT, src=IN, first=True, last=True),
            make("send", 1, src=IN, first=True),
        ],
        [make("recv", 0, dst=OUT)],
    ]
    assert "in and out are one" in rejection("broadcast", steps, [[3], [3]])
    steps[0].reverse()
    assert _native.verify_schedules("broadcast", steps, [[3], [3]], 0)["ok"]


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


def test_impossible_problems_are_refused() -> None:
    steps: list[list[Step]] = [[], []]
    with pytest.raises(ValueError, match="root 2 is not one of 2 ranks"):
        _native.verify_schedules("broadcast", steps, [[3], [3]], 2)
    with pytest.raises(ValueError, match="1 counts, expected 2"):
        _native.verify_schedules("allgather", steps, [[3], [3]], 0)
    with pytest.raises(ValueError, match="2\\^64"):
        _native.verify("allgather", "ring", [[2**63, 2**63]] * 2, [0, 0], 0)
