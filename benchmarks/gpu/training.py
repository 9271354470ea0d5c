"""The training of a rank of world.py, with digests that ranks and reruns compare.

A small network on a batch that all ranks share; the reference is the same training by
one rank alone. The caller compares the digests of ranks and reruns.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ringjax

STEPS = int(os.environ.get("GPU_CHECK_STEPS", "50"))
BATCH, FEATURES = 24, 12
NORMALS = 100_003


def _parameters() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    widths = itertools.pairwise((FEATURES, 64, 64, 64, 1))
    return {
        f"layer_{i}": {
            "kernel": jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), jnp.float32),
            "bias": jnp.zeros(b, jnp.float32),
        }
        for i, (a, b) in enumerate(widths)
    }


def _loss(parameters: Any, x: Any, y: Any) -> Any:
    for name in sorted(parameters):
        layer = parameters[name]
        x = jnp.tanh(x) @ layer["kernel"] + layer["bias"]
    return ((x[:, 0] - y) ** 2).mean()


def _run(tx: Any, rank: int, size: int) -> Any:
    @jax.jit
    def step(parameters: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(_loss)(parameters, x, y)
        updates, state = tx.update(grads, state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters = _parameters()
    state, rng = tx.init(parameters), np.random.default_rng(3)
    for _ in range(STEPS):
        x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
        y = (np.tanh(x.sum(-1)) ** 2).astype(np.float32)
        parameters, state = step(parameters, state, x[rank::size], y[rank::size])
    return jax.device_get(parameters)


def train(overlap: bool, compression: Any = ringjax.Compression.none) -> str:
    """Trains, compares the result with one rank alone, returns a digest of all bits."""
    tx = optax.chain(
        ringjax.allreduce_grads(
            overlap=overlap, bucket_bytes=20_000, compression=compression
        ),
        optax.sgd(0.05),
    )
    trained = _run(tx, ringjax.rank(), ringjax.size())
    alone = _run(optax.sgd(0.05), 0, 1)
    start = jax.device_get(_parameters())
    wide = 1e-4 if compression is ringjax.Compression.none else 5e-2
    moved = 0.0
    leaves = map(jax.tree.leaves, (trained, alone, start))
    for got, want, was in zip(*leaves, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, rtol=wide, atol=wide)
        moved = max(moved, float(np.abs(want - was).max()))
    assert moved > 0.01, "nothing was learnt, so nothing was compared"
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(trained):
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def normals(rank: int) -> Any:
    """Returns the numbers of a rank for a sum, which psum.py computes, too."""
    return np.random.default_rng((11, rank)).normal(size=NORMALS).astype(np.float32)


def sum_of_normals(rank: int) -> list[float]:
    """Returns some elements of the sum over all ranks, as exact text."""
    total = np.asarray(ringjax.allreduce(normals(rank), ringjax.Sum, name="normals"))
    return [float(v) for v in total[:: NORMALS // 1000]]
