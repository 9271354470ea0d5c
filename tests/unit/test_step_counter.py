"""Tests of the step counter: the largest operation ends a step; memory is bounded."""

from __future__ import annotations

import json

from ringjax.world import step_counter
from ringjax.world.step_counter import StepCounter


def line(name: str, size: int = 4, agreed: float | None = 1.0, group: int = 0) -> bytes:
    call = {"lane": "named", "op": "allreduce", "name": name, "bytes": size}
    return json.dumps({**call, "set": group, "agreed": agreed}).encode() + b"\n"


def test_the_largest_operation_ends_a_step() -> None:
    one = line("loss") + line("grads", 1000) + line("failed", 9999, None)
    one += line("pair", 99999, group=3) + line("loss")
    counted = StepCounter(3)
    assert counted.cut(3 * one) == 3 * one
    assert not counted.over
    kept = counted.cut(3 * one)
    assert counted.over
    assert kept == line("loss") + line("grads", 1000)


def test_an_operation_that_becomes_largest_ends_steps() -> None:
    counted = StepCounter(2)
    counted.cut(2 * line("a", 100) + 9 * line("b", 1))
    assert counted.cut(30 * line("b", 1000) + line("a", 100)) == 3 * line("b", 1000)
    assert counted.over


def test_nothing_is_added_if_enough_calls_were_counted() -> None:
    counted = StepCounter(3)
    counted.cut(line("x", 1000) + 8 * line("y", 10))
    assert not counted.over  # x is the largest operation so far
    assert counted.cut(100 * line("y", 10)) == b""
    assert counted.over


def test_names_that_occur_once_are_forgotten() -> None:
    counted = StepCounter(5)
    for number in range(3):
        names = (line(f"{number}.{i}") for i in range(step_counter.MAX_KINDS))
        counted.cut(line("grads", 1000) + b"".join(names))
        assert len(counted._counts) <= step_counter.MAX_KINDS
    counted.cut(b"".join(line("grads", 1000) for _ in range(6)))
    assert counted.over
