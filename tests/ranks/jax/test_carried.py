"""Random keys and dtypes below 8 bits, which are moved but not reduced.

Also settings of JAX: the transfer guard, 64-bit integers and strict promotion.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ringjax

# Three ranks run all code of this layer.
pytestmark = [
    pytest.mark.ranks(1, 3),
    pytest.mark.launch("collectives"),
    pytest.mark.usefixtures("world"),
]

NARROW = [
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "int4",
    "uint4",
]
WITH_AND_WITHOUT_JIT = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])


def same(out: Any, wanted: Any) -> None:
    assert np.asarray(out).tobytes() == np.asarray(wanted).tobytes()


@WITH_AND_WITHOUT_JIT
def test_dtypes_of_fewer_than_8_bits(world, wrap) -> None:
    def of(name: str, rank: int) -> Any:
        numbers = np.arange(6).reshape(3, 2) % 3 + (rank == 0)
        return jnp.asarray(numbers, getattr(ml_dtypes, name))

    def program(mine: Any, rows: Any) -> Any:
        swapped = {name: ringjax.alltoall(x) for name, x in rows.items()}
        root = ringjax.broadcast(mine, world.size - 1)
        return ringjax.allgather(mine), root, swapped

    mine = {name: of(name, world.rank) for name in NARROW}
    rows = {name: jnp.concatenate([x] * world.size) for name, x in mine.items()}
    gathered, root, swapped = wrap(program)(mine, rows)
    for name, x in mine.items():
        wanted = np.concatenate([of(name, rank) for rank in range(world.size)])
        assert gathered[name].dtype == x.dtype
        same(gathered[name], wanted)
        same(root[name], of(name, world.size - 1))
        same(swapped[name], wanted)
        with pytest.raises(TypeError, match=f"dtype {name}"):
            ringjax.allreduce(x)


@WITH_AND_WITHOUT_JIT
def test_random_keys(world, wrap) -> None:
    keys = jax.random.split(jax.random.key(world.rank), 2)
    wanted = [jax.random.split(jax.random.key(r), 2) for r in range(world.size)]
    data = jax.random.key_data
    gathered = wrap(ringjax.allgather)({"k": keys})["k"]
    assert gathered.dtype == keys.dtype and gathered.shape == (2 * world.size,)
    same(data(gathered), np.concatenate([data(k) for k in wanted]))
    scalars = wrap(ringjax.allgather)(keys[0])
    same(data(scalars), np.stack([data(k[0]) for k in wanted]))
    root = wrap(lambda k: ringjax.broadcast(k, 0))(keys[1])
    assert root.shape == ()
    same(data(root), data(wanted[0][1]))
    with pytest.raises(TypeError, match="jax.random.key_data"):
        ringjax.allreduce(keys)


def test_derivatives_with_dtypes_of_fewer_than_8_bits(world) -> None:
    def loss(x):
        small = ringjax.allgather(x.astype(jnp.float8_e5m2))
        return jnp.sum(small.astype(jnp.float32) * 2)

    np.testing.assert_allclose(jax.grad(loss)(jnp.ones(2)), 2.0 * world.size)


def test_the_transfer_guard_ignores_ringjaxs_own_arrays(world) -> None:
    x, row = jnp.arange(world.rank + 1.0), jnp.ones(1)
    splits = [1] + [0] * (world.size - 1)
    params = {"w": np.ones(3), "n": 3, "x": jnp.ones(2)}
    with jax.transfer_guard("disallow"):
        ringjax.barrier()
        metrics = ringjax.allreduce_metrics({"loss": 1.0})
        everything = ringjax.broadcast_parameters(params)
        objects = ringjax.allgather_object(world.rank)
        assert ringjax.broadcast_object({"a": 1}) == {"a": 1}
        gathered = ringjax.allgather(x)
        ringjax.alltoall(row, splits)
        with pytest.raises(Exception, match="Disallowed host-to-device"):
            ringjax.allreduce(np.ones(3, np.float32))
    assert metrics == {"loss": 1.0} and everything["n"] == 3
    assert objects == list(range(world.size))
    wanted = [np.arange(r + 1, dtype=np.float32) for r in range(world.size)]
    same(gathered, np.concatenate(wanted))


def test_integers_that_jax_would_truncate_are_refused(world) -> None:
    small = np.array([1, 2**31 - 1])
    same(ringjax.broadcast(small, 0), small.astype(np.int32))
    for large in (np.array([1, 2**31]), np.int64(-(2**31) - 1), np.uint64(2**32)):
        with pytest.raises(
            ValueError, match=r"`tensor` 'n' is u?int64 .*ringjax\.eager"
        ):
            ringjax.allreduce({"n": large}, ringjax.Sum)
    with jax.enable_x64(True):
        same(ringjax.broadcast(np.array([2**40]), 0), np.array([2**40]))


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_weights_under_strict_promotion(world, compression: str) -> None:
    tx = ringjax.allreduce_grads(compression=getattr(ringjax.Compression, compression))
    dtypes = ("bfloat16", "float16", "float32", "complex64")
    grads = {name: jnp.full(3, world.rank + 1, name) for name in dtypes}
    with jax.numpy_dtype_promotion("strict"):
        out, _ = tx.update(grads, tx.init(grads), grads, weight=world.rank + 1)
    ranks = np.arange(1, world.size + 1)
    wanted = (ranks**2).sum() / ranks.sum()
    for name, x in out.items():
        assert x.dtype == name
        got = np.asarray(x.astype(jnp.complex64)).real
        np.testing.assert_allclose(got, wanted, rtol=0.01)
