"""Tests of the table of members, and of lists of numbers in messages."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ringjax.control.member import Member
from ringjax.control.number_lists import (
    compress,
    compress_column,
    expand,
    expand_column,
)
from ringjax.control.sealed_messages import encode
from ringjax.membership import member_table


def hello(host: str, **more: Any) -> dict[str, Any]:
    return {"machine": f"machine of {host}", "hostname": host, "shm": True} | more


def test_lists_of_numbers_are_restored() -> None:
    choice = random.Random(1)
    lists = [[], [5], [5, 5], list(range(300)), list(range(3, 99, 8)), [9, 7, 5, -1]]
    lists += [[choice.randrange(-2, 9) for _ in range(n)] for n in range(60)]
    for numbers in lists:
        assert expand(compress(numbers)) == tuple(numbers)
        assert expand_column(compress_column(numbers)) == numbers
    assert len(compress([*range(100), *range(101, 4096)])) == 2


def test_a_table_is_restored() -> None:
    names = [
        "n009",
        "n009",
        "n010",
        "n011",
        "login",
        "n010",
        "a7.x",
        "a8.x",
        "a8.y",
        "",
    ]
    hellos = [hello(name, cuda=i % 3, shm=i != 4) for i, name in enumerate(names)]
    workers = [3, 1, 4, 10, 5, 9, 2, 6, 8, 7]
    table = member_table.decode(member_table.encode(workers, hellos))
    hosts = [0, 0, 1, 2, 3, 1, 4, 5, 6, 7]
    assert list(table) == [
        Member(rank, worker, host, name, rank != 4, rank % 3)
        for rank, (worker, host, name) in enumerate(
            zip(workers, hosts, names, strict=True)
        )
    ]


def test_machines_with_one_name_are_different_hosts() -> None:
    hellos = [hello("a"), hello("a", machine="another"), {}]
    table = member_table.decode(member_table.encode([0, 1, 2], hellos))
    assert [(m.host, m.hostname) for m in table] == [(0, "a"), (1, "a"), (2, "")]


@pytest.mark.parametrize(("ranks", "per_host"), [(4096, 8), (27600, 6)])
def test_the_table_of_many_ranks_is_short(ranks: int, per_host: int) -> None:
    hellos = [hello(f"node{r // per_host:05}.cluster") for r in range(ranks)]
    table = member_table.encode(range(ranks), hellos)
    assert len(encode({"table": table})) < 500
    # Some ranks are lost, and others have taken their places at the end.
    order = [r for r in range(ranks) if r % 97] + list(range(0, ranks, 97))
    table = member_table.encode(order, [hellos[r] for r in order])
    assert len(encode({"table": table})) < ranks


@pytest.mark.parametrize(
    "change",
    [
        {"workers": [[0, 1, 1]]},
        {"workers": [[0, 1]]},
        {"workers": [[0, "x", 1]]},
        {"workers": [[0, 1 << 40, 0]]},
        {"host": [[[7, 1, 0]], [[2, 1, 0]]]},
        {"host": [[[0, 1, 0]], [[1 << 40, 1, 0]]]},
        {"cuda": [[[0, 1, 0]], [[2, 1, 0], [2, 1, 0]]]},
        {"hostnames": [["a", 2]]},
        {"hostnames": [["a1", 1 << 40]]},
        {"hostnames": 3},
        {"shm": None},
    ],
)
def test_a_malformed_table_is_refused(change: dict[str, Any]) -> None:
    table = member_table.encode([0, 1], [hello("a"), hello("a")])
    with pytest.raises((LookupError, TypeError, ValueError)):
        member_table.decode(table | change)
