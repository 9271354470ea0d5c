"""Tests of benchmarks/hosts/many_ranks.py with few clients and without ranks."""

from __future__ import annotations

import os

import pytest

from benchmarks.harness import jobs
from benchmarks.hosts import many_ranks


def test_clients_of_the_coordinator(capfd: pytest.CaptureFixture[str]) -> None:
    row = many_ranks.gather(5)
    assert row["clients"] == 5
    assert row["peak MiB"] >= 0
    assert {"gather s", "exchange s", "end s", "cpu s"} < row.keys()
    assert capfd.readouterr().err == ""


def test_reports_are_found_among_other_lines() -> None:
    text = f'[0]<stdout>:{jobs.MARK}{{"ranks": 3}}\n[1]<stdout>:else\n'
    assert jobs.reports(text) == [{"ranks": 3}]
    assert jobs.reports("nothing") == []


def test_the_table() -> None:
    rows = [{"ranks": 8, "s": 0.12345}, {"ranks": 256, "s": 1234.5}]
    lines = many_ranks.table(rows).splitlines()
    assert [line.split() for line in lines] == [
        *(["ranks", "s"], ["8", "0.123"], ["256", "1234"]),
    ]


def test_memory_of_a_process() -> None:
    assert many_ranks.own_memory() > 1
    with open(os.memfd_create("ringjax-test"), "wb") as file:
        before = many_ranks.shared_memory()
        file.write(bytes(1 << 20))
        file.flush()
        assert many_ranks.shared_memory() - before == 1
