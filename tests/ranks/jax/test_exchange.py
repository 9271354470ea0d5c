"""The exchange of exact sums: the bits of one process, on any ranks and transports."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax
from ringjax import _native, runtime
from ringjax.collectives.exchange import exchange

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.launch("exchange")]

PIECES = 12
SIZES = (1000, 0, 1, 70_001)
UNITS = np.array([-40, -3, 0, -25], np.int32)


def sums_of(rank: int, sizes=SIZES) -> np.ndarray:
    rng = np.random.default_rng(rank)
    return rng.integers(-(2**55), 2**55, sum(sizes), np.int64)


def checksum_of(sums: np.ndarray) -> np.ndarray:
    """Returns the checksum of sums, as uint32[4]."""
    words = sums.view(np.uint64)
    odd = 2 * np.arange(len(words), dtype=np.uint64) + np.uint64(1)
    total = np.array([words.sum(), (words * odd).sum()], np.uint64)
    return total.view(np.uint32)


def mean_of(total: np.ndarray, sizes=SIZES, units=UNITS) -> np.ndarray:
    """Returns the mean, rounded once from long double."""
    scale = np.repeat(np.exp2(units.astype(np.longdouble)), sizes)
    return (total.astype(np.longdouble) * scale / PIECES).astype(np.float32)


def call(rank: int, control, **options):
    sums = sums_of(rank)
    words = jnp.asarray(sums.view(np.uint32).reshape(-1, 2))
    return exchange(
        *(words, control, jnp.array([rank, -rank], jnp.int32), jnp.asarray(UNITS)),
        jnp.asarray(checksum_of(sums)),
        **{"sizes": SIZES, "pieces": PIECES, "name": "grads", **options},
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_the_mean_of_the_total_and_the_sums_of_the_control(world, compiled) -> None:
    run = (lambda c: call(world.rank, c)) if not compiled else None
    run = run or jax.jit(lambda c: call(world.rank, c))
    own = jnp.array([1, world.rank, -7], jnp.int32)
    mean, control, maxima, units, checksum = run(own)
    total = np.sum([sums_of(r) for r in range(world.size)], axis=0)
    np.testing.assert_array_equal(mean, mean_of(total))
    assert control.tolist() == [world.size, sum(range(world.size)), -7 * world.size]
    assert maxima.tolist() == [world.size - 1, 0]
    assert units.tolist() == UNITS.tolist()
    assert checksum.tolist() == checksum_of(total).tolist()


def test_in_loops_and_branches(world) -> None:
    def body(i, seen):
        mean, control, *_ = call(world.rank, jnp.array([1], jnp.int32))
        return seen + control[0] + (mean[0] == mean_of_all[0])

    mean_of_all = mean_of(np.sum([sums_of(r) for r in range(world.size)], axis=0))
    loop = jax.jit(lambda n: jax.lax.fori_loop(0, n, body, jnp.int32(0)))
    assert loop(3) == 3 * (world.size + 1)


@pytest.mark.parametrize("elements", [0, 1, 17, 300_000])
def test_numpy_arrays(world, elements) -> None:
    sums, sizes = sums_of(world.rank, (elements,)), (elements,)
    mean, control = np.empty(elements, np.float32), np.empty(0, np.int32)
    units, checksum = np.array([-20], np.int32), np.empty(4, np.uint32)
    runtime.communicator().execute(
        _native.COLLECTIVES["exchange"],
        _native.REDUCE_OPS["Sum"],
        [sums, control, control, units, checksum_of(sums)],
        [mean, control, control, units.copy(), checksum],
        counts=[PIECES, elements],
    )
    total = np.sum([sums_of(r, sizes) for r in range(world.size)], axis=0)
    np.testing.assert_array_equal(mean, mean_of(total, sizes, units))
    assert checksum.tolist() == checksum_of(total).tolist()


def test_statistics_and_recent_calls_name_it(world) -> None:
    for calls in (1, 2):
        mean, *_ = call(world.rank, jnp.zeros(1, jnp.int32), name=f"c{calls}")
        mean.block_until_ready()
        stats = ringjax.stats()["process_sets"][0]["compiled"]["exchange"]
        if calls == 1:
            before = stats
    assert stats["calls"] == before["calls"] + 1
    sent = stats["sent_bytes"] - before["sent_bytes"]
    share = sum(SIZES) * (world.size - 1) / world.size
    assert 0.99 * 12 * share <= sent <= 1.01 * 12 * share + 1000
    last = [c for c in ringjax.recent_calls() if c["op"] == "exchange"][-1]
    assert last["name"] == "c2" and last["bytes"] >= 8 * sum(SIZES)


@pytest.mark.ranks(2, 3)
def test_units_that_differ_are_named(world) -> None:
    units = jnp.asarray(UNITS).at[3].add(world.rank == 1)
    sums = sums_of(0)
    words = jnp.asarray(sums.view(np.uint32).reshape(-1, 2))
    one, checksum = jnp.zeros(1, jnp.int32), jnp.asarray(checksum_of(sums))
    wrong = re.escape("leaf 3 of 70001 elements, unit 2^-24")
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=wrong):
        out = exchange(words, one, one, units, checksum, sizes=SIZES, pieces=PIECES)
        out[0].block_until_ready()


def test_arguments_that_do_not_fit_are_refused(world) -> None:
    with pytest.raises(ValueError, match=r"do not fit together; expected"):
        call(world.rank, jnp.zeros(1, jnp.int32), sizes=(1, 2))
    with pytest.raises(NotImplementedError):
        jax.vmap(lambda c: call(world.rank, c))(jnp.zeros((2, 1), jnp.int32))
