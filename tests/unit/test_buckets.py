"""Tests of the plan of gradient buckets and of the order of their calls.

Each leaf is in one bucket. A bucket has one dtype and a bounded size. Buckets follow
the order in which gradients become ready. The plan of calls bounds how many buckets
are in flight at the same time.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringjax.xla import buckets

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
def test_buckets_follow_the_order_of_readiness(problem) -> None:
    avals, limit, order = problem
    if order is None:
        order = list(range(len(avals)))[::-1]
    place = {index: at for at, index in enumerate(order)}
    cuts = [[place[i] for i in cut] for cut in buckets.plan(avals, limit, order)]
    assert all(cut == sorted(cut) for cut in cuts)
    ready = [cut[-1] for cut in cuts]
    assert ready == sorted(ready)


@given(problems())
def test_no_two_neighboring_buckets_of_a_dtype_fit_into_one(problem) -> None:
    avals, limit, order = problem
    last: dict[str, list[int]] = {}
    for cut in buckets.plan(avals, limit, order):
        dtype = avals[cut[0]][1]
        if dtype in last:
            filled = sum(size(avals[i]) for i in last[dtype])
            assert filled + size(avals[cut[0]]) > limit
        last[dtype] = list(cut)


def test_empty_leaves_make_no_bucket() -> None:
    assert buckets.plan([], 1) == ()


def test_alternating_dtypes_share_two_buckets() -> None:
    avals = [((4,), "float32"), ((4,), "float16")] * 3
    assert buckets.plan(avals, 1000) == ((5, 3, 1), (4, 2, 0))


def test_a_leaf_above_the_bound_has_its_own_bucket() -> None:
    avals = [((10,), "int8"), ((1000,), "int8"), ((10,), "int8")]
    assert buckets.plan(avals, 100) == ((2,), (1,), (0,))


def test_bytes_of_extended_dtypes() -> None:
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


# -- buckets on a slow wire ------------------------------------------------------------


@given(problems(), st.integers(0, 1 << 21))
def test_refining_splits_buckets_and_keeps_their_order(problem, most) -> None:
    avals, limit, order = problem
    sizes = [size(a) << 12 for a in avals]
    cuts = buckets.plan(avals, limit, order)
    pieces = buckets.refine(cuts, sizes, most)
    assert [i for p in pieces for i in p] == [i for cut in cuts for i in cut]
    assert all(any(set(p) <= set(cut) for cut in cuts) for p in pieces)
    left = sum(sizes)
    for p in pieces:
        filled = sum(sizes[i] for i in p)
        assert filled <= most or len([i for i in p if sizes[i]]) <= 1
        assert (
            filled <= max(buckets.MIN_CUT_BYTES, left / 4) or len(p) == 1 or not filled
        )
        left -= filled


def test_the_last_pieces_are_small() -> None:
    sizes = [1 << 20] * 64
    pieces = buckets.refine((tuple(range(64)),), sizes, 8 << 20)
    counts = [len(p) for p in pieces]
    assert counts[:2] == [8, 8] and counts[-4:] == [1, 1, 1, 1]
    assert counts == sorted(counts, reverse=True)


NEEDS = st.lists(st.integers(0, 100), max_size=30)


@given(NEEDS, st.integers(0, 300))
def test_a_window_stays_within_its_memory(needs, memory) -> None:
    calls, most = buckets.window(needs, memory)
    assert sorted(b for kind, b in calls if kind != "done") == list(range(len(needs)))
    held, peak, pending = 0, 0, []
    for place, (kind, bucket) in enumerate(calls):
        if kind == "run":
            assert needs[bucket] > memory
        elif kind == "start":
            pending.append(bucket)
            held += needs[bucket]
            peak = max(peak, held)
        else:
            assert pending.pop(0) == bucket
            starts = [b for kind, b in calls[place:] if kind == "start"]
            # A DONE precedes a START only if memory does not suffice for both.
            assert not starts or held + needs[starts[0]] > memory
            held -= needs[bucket]
    assert not pending
    assert most == peak <= memory


@given(NEEDS)
def test_without_a_limit_every_start_precedes_every_done(needs) -> None:
    calls, most = buckets.window(needs, math.inf)
    every = range(len(needs))
    assert calls == [*(("start", b) for b in every), *(("done", b) for b in every)]
    assert most == sum(needs)


def test_memory_includes_the_native_cores_padding() -> None:
    assert buckets.packed_bytes([0, 1, 64, 65]) == 0 + 64 + 64 + 128


@given(st.integers(0, 3000), st.integers(1, 700))
def test_splitting_gives_few_even_pieces_in_order(count: int, most: int) -> None:
    found = buckets.split_evenly(count, most)
    assert [i for piece in found for i in piece] == list(range(count))
    assert len(found) == max(1, -(-count // most))
    lengths = [len(piece) for piece in found]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 1500), st.booleans(), st.booleans())
def test_calls_are_bounded_except_in_elastic_steps(count, overlapped, whole):
    cuts, calls, _, _ = buckets.plan_calls(
        *([4] * count, (tuple(range(count)),), 1 << 30),
        elastic_memory=1 << 30 if whole else None,
        overlapped=overlapped,
    )
    assert sorted(i for cut in cuts for i in cut) == list(range(count))
    if whole and not overlapped:
        assert calls == [("run", 0)]
    else:
        assert max(map(len, cuts)) <= buckets.MAX_TENSORS
