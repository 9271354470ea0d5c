"""`ringjax.exact.Sums` against rational numbers, in a job of one rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringjax
from ringjax.exact import Accumulator, Sums, fixed_point, native_add

TINY = np.finfo("f4").tiny
MOST = np.finfo("f4").max


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    ringjax.init()
    yield
    ringjax.shutdown()


def merged(a: Accumulator, b: Accumulator) -> Accumulator:
    """Adds two accumulators as an exchange between two ranks does."""
    words, checksum = (
        np.frombuffer(
            np.asarray(x).view("i8") + np.asarray(y).view("i8"), "u4"
        ).reshape(x.shape)
        for x, y in ((a.words, b.words), (a.checksum, b.checksum))
    )
    return replace(
        a,
        words=jnp.asarray(words),
        checksum=jnp.asarray(checksum),
        counts=a.counts + b.counts,
        top=jnp.maximum(a.top, b.top),
        added=a.added + b.added,
    )


@functools.cache
def compiled(pieces: int) -> tuple[Any, Any]:
    sums = Sums(pieces)
    return jax.jit(sums.add), jax.jit(sums.exchange)


def result(
    pieces: list[np.ndarray], exponents: Any, groups: list[list[int]]
) -> tuple[np.ndarray, Any, Any]:
    """Adds each group of pieces on its own, then the groups; returns the exchange."""
    add, exchange = compiled(len(pieces))
    parts = []
    for group in groups:
        total = Sums(len(pieces)).zeros(pieces[0])
        for i in group:
            total = add(total, pieces[i], exponents)
        parts.append(total)
    mean, after, again, _ = exchange(functools.reduce(merged, parts), exponents)
    return np.asarray(mean), after, again


def expected(pieces: list[np.ndarray], exponent: int) -> list[float]:
    """Returns the means by integers of Python; its round() rounds halves to even."""
    count = len(pieces)
    unit = max(exponent + 9 - fixed_point.width(count), -125)
    terms = [[Fraction(float(x)) / Fraction(2) ** unit for x in p] for p in pieces]
    sums = [sum(map(round, each)) for each in zip(*terms, strict=True)]
    return [float(s) * math.ldexp(1 / count, unit) for s in sums]


def drawn(seed: int, count: int, spread: int, cancels: bool) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (count, 5)
    scale = 2.0 ** (rng.integers(-spread, 1, shape) + rng.integers(-60, 60))
    values = np.float32(rng.standard_normal(shape) * scale)
    if cancels and count > 2:
        values[1 : count // 2 * 2 : 2] = -values[: count // 2 * 2 : 2][: count // 2]
    return list(values)


@settings(max_examples=40)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 3, 5, 12, 64, 100]) | st.integers(1, 200),
    st.sampled_from([0, 5, 30, 60]),
    st.booleans(),
    st.integers(1, 5),
)
def test_any_order_and_grouping_gives_the_mean_of_rationals(
    seed, count, spread, cancels, groups
) -> None:
    pieces = drawn(seed, count, spread, cancels)
    largest = max(float(np.abs(p).max()) for p in pieces)
    exponent = math.frexp(largest)[1] - 1
    exponents = jnp.array([exponent], jnp.int32)
    order = np.random.default_rng(seed).permutation(count)
    parts = [order[i::groups].tolist() for i in range(groups)]
    mean, after, again = result(pieces, exponents, parts)
    assert not again and after.tolist() == [exponent]
    np.testing.assert_array_equal(mean, np.float32(expected(pieces, exponent)))
    other, *_ = result(pieces, exponents, [list(range(count))])
    np.testing.assert_array_equal(mean, other)
    # The mean is also near that of the unrounded values.
    error = Fraction(2) ** (exponent + 9 - fixed_point.width(count))
    for got, column in zip(mean, zip(*pieces, strict=True), strict=True):
        right = sum(map(Fraction, map(float, column))) / count
        assert abs(Fraction(float(got)) - right) <= error + abs(right) / 2**23


def test_2048_pieces_in_two_orders() -> None:
    pieces = drawn(5, 2048, 12, False)
    exponent = math.frexp(max(float(np.abs(p).max()) for p in pieces))[1] - 1
    exponents = jnp.array([exponent], jnp.int32)
    first, *_ = result(pieces, exponents, [list(range(2048))])
    backwards, *_ = result(pieces, exponents, [list(range(2047, -1, -1))])
    np.testing.assert_array_equal(first, backwards)
    np.testing.assert_array_equal(first, np.float32(expected(pieces, exponent)))


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(-70, 70), st.sampled_from([1, 3, 12, 2048]))
def test_a_step_is_repeated_at_most_once(seed, shift, count) -> None:
    sums = Sums(count)
    values = np.random.default_rng(seed).standard_normal(3).astype("f4")
    example = sums.exponents(values * np.float32(2.0**shift))
    add, exchange = compiled(count)

    def step(exponents):
        total = add(sums.zeros(values), values, exponents)
        return exchange(replace(total, added=jnp.array(count)), exponents)

    mean, after, again, _ = step(example)
    if again:
        mean, after, again, _ = step(after)
    assert not again and after.tolist() == sums.exponents(values).tolist()
    np.testing.assert_allclose(mean, values / count, rtol=2e-7, atol=1e-7 / count)


EXTREMES = [0.0, -0.0, TINY, TINY / 2, -TINY / 3, 1e-45, MOST, -MOST, 1.0, -1.5, 3e-39]
SPECIAL = [np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_native_form_computes_the_same_as_the_form_in_xla(dtype) -> None:
    rng = np.random.default_rng(7)
    with jax.enable_x64(True):
        wide = [
            np.array(EXTREMES),
            np.array(EXTREMES + SPECIAL),
            rng.standard_normal((37, 3)) * 2.0 ** rng.integers(-40, 9),
            np.zeros((0, 4)),
            np.array(0.5),
            rng.standard_normal(2000),
        ]
        leaves = [jnp.asarray(x).astype(dtype) for x in wide]
        if dtype == "float64":
            leaves.append(jnp.asarray([1e300, -1e39, 2.0**-1060, 1 + 2.0**-40]))
    total = Sums(12).zeros(leaves)
    for lowest in (-200, -76, -10, 0, 60, 127):
        exponents = jnp.arange(lowest, lowest + len(leaves), dtype=jnp.int32)
        units = fixed_point.units(exponents, 12)
        parts = (total.words, total.counts, total.top, total.checksum)
        native = jax.jit(native_add.add_leaves, static_argnums=3)(
            parts, units, leaves, 58
        )
        plain = jax.jit(fixed_point.add_leaves, static_argnames="width")(
            *parts, units, *leaves, width=58
        )
        jax.tree.map(np.testing.assert_array_equal, list(native), list(plain))
        total = Accumulator(*native, total.added, total.layout)


def test_extremes_are_counted_and_make_a_leaf_nan() -> None:
    sums = Sums(1)
    tree = {"a": np.float32([1, np.nan]), "b": np.float32([MOST, TINY, TINY / 2])}
    exponents = jnp.array([0, 127], jnp.int32)
    total = sums.add(sums.zeros(tree), tree, exponents)
    assert total.counts.tolist() == [[0, 1], [0, 0]]
    mean, after, again, _ = sums.exchange(total, exponents)
    assert np.isnan(mean["a"]).all() and mean["b"][0] == MOST
    assert not again and after.tolist() == [0, 127]
    total = sums.add(sums.zeros(tree), tree, jnp.array([-20, 100], jnp.int32))
    assert total.counts.tolist() == [[1, 1], [1, 0]]
    total = sums.add(sums.zeros(tree), {**tree, "b": tree["b"] * 0}, exponents)
    mean, after, again, _ = sums.exchange(total, exponents)
    assert not again and after.tolist() == [0, 127] and not mean["b"].any()


def test_small_values_count_down_to_the_smallest_normal_float() -> None:
    sums = Sums(1)
    values = np.float32([TINY * 1.25, -TINY * 8, TINY / 2])
    exponents = sums.exponents(values)
    mean, *_ = sums.exchange(sums.add(sums.zeros(values), values, exponents), exponents)
    np.testing.assert_array_equal(mean, np.float32([TINY * 2, -TINY * 8, 0]))


def test_an_accumulator_that_is_not_donated_stays() -> None:
    sums = Sums(4)
    tree = [jnp.ones(1000)]
    total = sums.zeros(tree)
    after = jax.jit(sums.add)(total, tree, sums.exponents(tree))
    assert not total.words.any() and not total.checksum.any() and after.words.any()


def test_a_donated_accumulator_is_added_to_in_place() -> None:
    sums = Sums(4)
    tree = {"a": jnp.ones(1000), "b": jnp.ones((3, 3), jnp.bfloat16)}
    exponents = sums.exponents(tree)
    add = jax.jit(sums.add, donate_argnums=0)
    total = jax.block_until_ready(add(sums.zeros(tree), tree, exponents))
    before = total.words.unsafe_buffer_pointer()
    total = add(total, tree, exponents)
    assert total.words.unsafe_buffer_pointer() == before

    def loop(total):
        return jax.lax.fori_loop(0, 2, lambda _, t: sums.add(t, tree, exponents), total)

    mean, *_ = sums.exchange(jax.jit(loop)(total), exponents)
    jax.tree.map(np.testing.assert_array_equal, mean, jax.tree.map(np.float32, tree))


def test_the_checksum_of_an_accumulator_is_that_of_its_words() -> None:
    sums = Sums(8)
    tree = [
        np.random.default_rng(3).standard_normal(n).astype("f4") for n in (5, 0, 33)
    ]
    total = sums.zeros(tree)
    for _ in range(8):
        total = sums.add(total, tree, sums.exponents(tree))
    words = np.asarray(total.words).view("i8").ravel()
    weights = 2 * np.arange(words.size) + 1
    checksum = np.asarray(total.checksum).view("i8")
    assert checksum.tolist() == [words.sum(), (words * weights).sum()]


def test_a_shard_map_tracks_what_varies() -> None:
    sums = Sums(1)
    tree = {"a": jnp.arange(8.0)}
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    spec = jax.sharding.PartitionSpec("x")
    exponents = sums.exponents(tree)
    total = jax.jit(
        jax.shard_map(
            lambda t, x: sums.add(t, x, exponents).words,
            mesh=mesh,
            in_specs=(jax.sharding.PartitionSpec(), spec),
            out_specs=spec,
        )
    )(sums.zeros(tree), tree)
    np.testing.assert_array_equal(
        total, sums.add(sums.zeros(tree), tree, exponents).words
    )


def test_an_empty_tree_has_an_empty_mean() -> None:
    sums = Sums(1)
    total = sums.add(sums.zeros({}), {}, sums.exponents({}))
    mean, exponents, again, _ = sums.exchange(total, sums.exponents({}))
    assert mean == {} and exponents.shape == (0,) and not again


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="`pieces` is 0, expected 1 … 65,536"):
        Sums(0)
    sums = Sums(2)
    tree = {"w": jnp.ones(3), "step": jnp.ones((), jnp.int32)}
    with pytest.raises(TypeError, match="'step' has dtype int32 and shape"):
        sums.exponents(tree)
    total, exponents = sums.zeros({"w": jnp.ones(3)}), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"'w' has the shape \(4,\), expected \(3,\)"):
        sums.add(total, {"w": jnp.ones(4)}, exponents)
    with pytest.raises(
        ValueError, match="has the leaves v, expected those of zeros: w"
    ):
        sums.add(total, {"v": jnp.ones(3)}, exponents)
    with pytest.raises(
        ValueError, match=r"`exponents` have the shape \(2,\), expected"
    ):
        sums.add(total, {"w": jnp.ones(3)}, jnp.zeros(2, jnp.int32))
