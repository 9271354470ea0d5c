"""Tests of the benchmark's options, expected values, and statistics, without ranks."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest

from ringjax import bench


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1b", 1), ("4K", 4096), ("64MiB", 64 << 20), ("2gb", 2 << 30)],
)
def test_sizes_are_read_in_powers_of_1024(text: str, size: int) -> None:
    assert bench.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "K", "-4K", "4T", "1.5M", "4 KiB extra"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        bench.parse_size(text)


def test_sizes_grow_by_the_factor_up_to_the_end() -> None:
    assert bench.size_steps(4096, 100_000, 4) == [4096, 16384, 65536]
    assert bench.size_steps(8, 8, 2) == [8]
    assert bench.size_steps(9, 8, 2) == []


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("allreduce", 1.5),
        ("allgather", 0.75),
        ("reducescatter", 0.75),
        ("alltoall", 0.75),
        ("broadcast", 1.0),
    ],
)
def test_bus_factor_of_four_ranks(collective: str, factor: float) -> None:
    assert bench.bus_factor(collective, 4) == factor


@pytest.mark.parametrize("collective", bench.COLLECTIVES)
def test_one_rank_has_no_bus_bandwidth(collective: str) -> None:
    assert bench.bus_factor(collective, 1) == 0


def test_expected_values() -> None:
    f32 = np.dtype(np.float32)
    inputs = [bench.tensor("allreduce", r, 2, 4, f32).tolist() for r in (0, 1)]
    assert inputs == [[1, 2, 1, 2], [2, 1, 2, 1]]

    def answer(collective: str, op: str, rank: int) -> list[float]:
        return bench.expected(collective, op, rank, 2, 4, f32).tolist()

    assert answer("allreduce", "Sum", 0) == [3, 3, 3, 3]
    assert answer("allreduce", "Average", 1) == [1.5] * 4
    assert answer("allreduce", "Min", 0) == [1] * 4
    assert answer("reducescatter", "Max", 1) == [2, 2]
    assert answer("allgather", "Sum", 1) == [1, 2, 4, 5]
    assert answer("broadcast", "Sum", 1) == [1, 2, 3, 4]
    assert answer("alltoall", "Sum", 1) == [3, 4, 6, 7]


def test_average_of_integers_truncates_and_bytes_wrap() -> None:
    i32, u8 = np.dtype(np.int32), np.dtype(np.uint8)
    assert bench.expected("allreduce", "Average", 0, 2, 2, i32).tolist() == [1, 1]
    assert bench.expected("allreduce", "Product", 0, 18, 18, u8)[0] == 2**9 % 256


def test_a_wrong_result_is_reported() -> None:
    want = np.arange(4, dtype=np.float32)
    bench.check(want * (1 + 1e-7), want, "it")
    with pytest.raises(ArithmeticError, match=r"it: element 2 is 5\.0, expected 2\.0"):
        bench.check(np.array([0, 1, 5, 3], np.float32), want, "it")
    with pytest.raises(ArithmeticError, match=r"it: shape \(3,\), expected \(4,\)"):
        bench.check(want[:3], want, "it")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["allgather", "--donated"], "allreduce and broadcast"),
        (["allreduce", "-b", "2K", "-e", "1K"], "--begin is larger"),
        (["allreduce", "-f", "1"], "--factor must be 2"),
        (["allreduce", "--jit", "--eager"], "not allowed with"),
        (["scan"], "invalid choice"),
    ],
)
def test_bad_options_are_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.parse(words)
    assert text in capsys.readouterr().err


def row(size: int, median: float, **more: Any) -> dict[str, Any]:
    values = dict.fromkeys(bench.FIELDS) | {"size": size, "dtype": "f32"}
    return values | {"median": median, "spread": 0.0, "busbw": 1.0} | more


def test_rows_line_up_with_the_columns() -> None:
    values = (4096, 1024, "f32", 1234.56, 10.0, 98.76, 0.5, 0.75, None, "ring")
    text = bench.line(dict(zip(bench.FIELDS, values, strict=True)), "*")
    head = bench.COLUMNS.format(*bench.FIELDS)
    for field, shown in zip(bench.FIELDS[:-1], text.split(), strict=False):
        assert text.index(shown) + len(shown) == head.index(field) + len(field)
    assert text.endswith(" *1230      10.0      98.8   0.500   0.750       -  ring")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((999.6, "1000"), (99.96, "100"), (9.996, "10.0"), (0.0012345, "0.00123")),
        *((123456.0, "123000"), (0.0, "0"), (float("inf"), "inf"), (7, "7")),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert bench.digits(value) == text


def test_noisy_and_out_of_order_rows_are_marked() -> None:
    assert bench.spread([1.0, 1.0, 1.0, 1.0, 9.0]) == 0
    assert bench.spread([1.0, 2.0, 3.0]) == pytest.approx(0.5)
    small, large = row(1 << 18, 1065.0), row(1 << 20, 752.8, spread=0.3)
    assert bench.mark(small) == ""
    assert bench.mark(large, [small]) == "*^"
    assert bench.mark(row(1 << 20, 1060.0), [small]) == ""  # within the noise


def test_the_last_lines_explain_marks_and_give_an_average() -> None:
    *notes, bounds, average = bench.ending([row(8, 2.0), row(16, 1.0, busbw=2.0)])
    assert [note[:3] for note in notes] == ["# ^"]
    assert bounds == "# Out of bounds values : 0 OK"
    assert average == "# Avg bus bandwidth    : 1.50 GB/s"
    barrier = row(0, 2.0, busbw=None)
    assert bench.ending([barrier]) == [bounds]
    assert bench.line(barrier).split() == ["-", "-", "f32", "2.00", *"------"]


def test_default_options() -> None:
    options = bench.parse([])
    assert (options.collective, options.begin, options.end) == (
        *("allreduce", 4 << 10),
        64 << 20,
    )
