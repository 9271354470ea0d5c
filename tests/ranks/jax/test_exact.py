"""`ringjax.exact.Sums`: one result on any number of ranks, for any shares of pieces."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.exact import Sums

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.launch("exact")]

PIECES = 7
SHAPES = {"w": (13, 5), "bias": (), "none": (0, 3)}


def gradients(seed: int, scale: float = 1.0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {
            name: np.asarray(
                scale * rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 4, shape),
                "f4",
            )
            for name, shape in SHAPES.items()
        }
        for _ in range(PIECES)
    ]


def exchanged(world, pieces, exponents, owners, extra=None):
    """Adds the pieces of this rank, and exchanges them in one program."""
    sums = Sums(PIECES)
    add = jax.jit(sums.add)
    total = sums.zeros(pieces[0])
    for piece, owner in zip(pieces, owners, strict=True):
        if owner % world.size == world.rank:
            total = add(total, piece, exponents)
    return jax.jit(sums.exchange)(total, exponents, extra)


@pytest.mark.parametrize("owners", ["in turn", "random", "the last alone"])
def test_the_mean_is_that_of_rationals(world, owners) -> None:
    shares = {
        "in turn": np.arange(PIECES),
        "random": np.random.default_rng(3).integers(0, 60, PIECES),
        "the last alone": np.full(PIECES, world.size - 1),
    }[owners]
    pieces = gradients(1)
    exponents = Sums(PIECES).exponents(pieces[0])
    mean, after, again, extra = exchanged(
        world, pieces, exponents, shares, jnp.array([1, world.rank])
    )
    assert not again and extra.tolist() == [world.size, sum(range(world.size))]
    assert after.tolist() == [
        np.frexp(max(np.abs(p[n]).max(initial=0) for p in pieces) or 2.0**-8)[1] - 1
        for n in sorted(SHAPES)
    ]
    for name, values in mean.items():
        assert values.dtype == jnp.float32 and values.shape == SHAPES[name]
        each = zip(*(p[name].ravel() for p in pieces), strict=True)
        rational = [float(sum(map(Fraction, map(float, x))) / PIECES) for x in each]
        np.testing.assert_array_equal(values.ravel(), np.float32(rational))


def test_a_step_is_repeated_at_most_once(world) -> None:
    owners = np.arange(PIECES)
    before = Sums(PIECES).exponents(gradients(2)[0])
    _, before, *_ = exchanged(world, gradients(2), before, owners)
    for rise, repeats in ((8, False), (9, True), (90, True), (-20, False), (-60, True)):
        pieces = gradients(2, 2.0**rise)
        mean, after, again, _ = exchanged(world, pieces, before, owners)
        assert bool(again) == repeats
        if repeats:
            mean, after, again, _ = exchanged(world, pieces, after, owners)
            assert not again
        assert after[0] == before[0] + rise
        right = np.mean([np.float64(p["w"]) for p in pieces], 0)
        np.testing.assert_allclose(mean["w"], right, 1e-7 if repeats else 1e-5)


def test_values_that_are_not_finite_make_the_leaf_nan(world) -> None:
    pieces = gradients(4)
    exponents = Sums(PIECES).exponents(pieces[0])
    pieces[2]["w"][1, 1] = np.inf
    mean, after, again, _ = exchanged(world, pieces, exponents, np.arange(PIECES))
    assert np.isnan(mean["w"]).all() and np.isfinite(mean["bias"])
    assert not again and after[2] == exponents[2]


def test_a_missing_piece_makes_the_mean_nan(world) -> None:
    pieces = gradients(5)
    exponents = Sums(PIECES).exponents(pieces[0])
    sums = Sums(PIECES)
    total = sums.zeros(pieces[0])
    for number, piece in enumerate(pieces[1:]):
        if number % world.size == world.rank:
            total = sums.add(total, piece, exponents)
    mean, *_ = sums.exchange(total, exponents)
    assert np.isnan(mean["w"]).all() and np.isnan(mean["bias"])
