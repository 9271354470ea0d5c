"""The plan of buckets: every leaf once, one dtype, bounded, in order of readiness."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringjax import buckets

DTYPES = ("float32", "float64", "int8", "float16")
AVALS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 40), max_size=3).map(tuple), st.sampled_from(DTYPES)
    ),
    max_size=30,
)


def size(aval: tuple[tuple[int, ...], str]) -> int:
    shape, dtype = aval
    return math.prod(shape) * np.dtype(dtype).itemsize


@st.composite
def problems(draw):
    avals = draw(AVALS)
    order = draw(st.permutations(range(len(avals))) | st.none())
    return avals, draw(st.integers(1, 5000)), order


@given(problems())
def test_every_leaf_is_in_exactly_one_bucket(problem) -> None:
    avals, limit, order = problem
    cuts = buckets.plan(avals, limit, order)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(avals)))
    assert all(cuts)


@given(problems())
def test_a_bucket_has_one_dtype_and_is_bounded(problem) -> None:
    avals, limit, order = problem
    for cut in buckets.plan(avals, limit, order):
        assert len({avals[i][1] for i in cut}) == 1
        nonempty = [i for i in cut if size(avals[i])]
        assert sum(size(avals[i]) for i in cut) <= limit or len(nonempty) == 1


@given(problems())
def test_leaves_and_buckets_are_in_the_order_of_readiness(problem) -> None:
    avals, limit, order = problem
    if order is None:
        order = list(range(len(avals)))[::-1]
    place = {index: at for at, index in enumerate(order)}
    cuts = [[place[i] for i in cut] for cut in buckets.plan(avals, limit, order)]
    assert all(cut == sorted(cut) for cut in cuts)
    ready = [cut[-1] for cut in cuts]
    assert ready == sorted(ready)


@given(problems())
def test_two_neighbouring_buckets_of_one_dtype_do_not_fit_into_one(problem) -> None:
    avals, limit, order = problem
    last: dict[str, list[int]] = {}
    for cut in buckets.plan(avals, limit, order):
        dtype = avals[cut[0]][1]
        if dtype in last:
            filled = sum(size(avals[i]) for i in last[dtype])
            assert filled + size(avals[cut[0]]) > limit
        last[dtype] = list(cut)


def test_nothing_to_send_is_no_bucket() -> None:
    assert buckets.plan([], 1) == ()


def test_alternating_dtypes_share_two_buckets() -> None:
    avals = [((4,), "float32"), ((4,), "float16")] * 3
    assert buckets.plan(avals, 1000) == ((5, 3, 1), (4, 2, 0))


def test_a_leaf_above_the_bound_travels_alone() -> None:
    avals = [((10,), "int8"), ((1000,), "int8"), ((10,), "int8")]
    assert buckets.plan(avals, 100) == ((2,), (1,), (0,))


def test_extended_dtypes_count_their_bytes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    avals = [((4,), ml_dtypes.bfloat16)] * 4
    assert buckets.plan(avals, 16) == ((3, 2), (1, 0))


@pytest.mark.parametrize(
    ("limit", "order", "text"),
    [
        (0, None, "`bucket_bytes` is 0, expected at least 1"),
        (1, [0, 0], r"`order` is \[0, 0\], expected every index below 2 once"),
        (1, [0], r"`order` is \[0\], expected every index below 2 once"),
    ],
)
def test_a_bad_argument_is_named(limit, order, text) -> None:
    with pytest.raises(ValueError, match=text):
        buckets.plan([((1,), "int8")] * 2, limit, order)
