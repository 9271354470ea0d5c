"""A rank of test_training.py: trains, and prints its results as one line of JSON.

The arguments are the number of training steps and the ways to train. With the way
"psum" the rank uses jax.distributed and no ringjax, and prints XLA's sum.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from functools import partial
from typing import Any

from support import gpu_ranks

RANK = gpu_ranks.separate_host_of_job()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import ringjax  # noqa: E402

BATCH, FEATURES, LEARNING_RATE = 24, 12, 0.05
NORMALS = 100_003


def draw_parameters() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    widths = itertools.pairwise((FEATURES, 64, 64, 64, 1))
    return {
        f"layer_{i}": {
            "kernel": jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), jnp.float32),
            "bias": jnp.zeros(b, jnp.float32),
        }
        for i, (a, b) in enumerate(widths)
    }


def loss(parameters: Any, x: Any, y: Any) -> Any:
    for name in sorted(parameters):
        layer = parameters[name]
        x = jnp.tanh(x) @ layer["kernel"] + layer["bias"]
    return ((x[:, 0] - y) ** 2).mean()


def run(tx: Any, steps: int, rank: int, size: int) -> Any:
    """Returns the parameters after training on this rank's part of common batches."""

    @jax.jit
    def step(parameters: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(loss)(parameters, x, y)
        updates, state = tx.update(grads, state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters = draw_parameters()
    state, rng = tx.init(parameters), np.random.default_rng(3)
    for _ in range(steps):
        x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
        y = (np.tanh(x.sum(-1)) ** 2).astype(np.float32)
        parameters, state = step(parameters, state, x[rank::size], y[rank::size])
    return jax.device_get(parameters)


def train(steps: int, overlap: bool, compression: Any) -> str:
    """Trains, compares with the same training by one rank, and returns a digest."""
    exchange = ringjax.allreduce_grads(
        overlap=overlap, bucket_bytes=20_000, compression=compression
    )
    tx = optax.chain(exchange, optax.sgd(LEARNING_RATE))
    trained = run(tx, steps, ringjax.rank(), ringjax.size())
    alone = run(optax.sgd(LEARNING_RATE), steps, 0, 1)
    start = jax.device_get(draw_parameters())
    near = 1e-4 if compression is ringjax.Compression.none else 5e-2
    moved = 0.0
    leaves = map(jax.tree.leaves, (trained, alone, start))
    for got, want, was in zip(*leaves, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, rtol=near, atol=near)
        moved = max(moved, float(np.abs(want - was).max()))
    assert moved > 0.01, "the parameters have not changed, so the comparison is empty"
    return gpu_ranks.digest(trained)


WAYS = {
    "in place": partial(train, overlap=False, compression=ringjax.Compression.none),
    "overlapped": partial(train, overlap=True, compression=ringjax.Compression.none),
    "compressed": partial(train, overlap=True, compression=ringjax.Compression.bf16),
}


def normals() -> Any:
    """Draws the numbers of this rank, whose sum ringjax and psum compute."""
    return np.random.default_rng((11, RANK)).normal(size=NORMALS).astype(np.float32)


def sample(total: Any) -> list[float]:
    return [float(value) for value in np.asarray(total)[:: NORMALS // 1000]]


def psum() -> list[float]:
    """Returns a part of the sum of all ranks' numbers, added by jax.lax.psum."""
    size, port = int(os.environ["RINGJAX_SIZE"]), os.environ["PSUM_PORT"]
    jax.distributed.initialize(
        f"127.0.0.1:{port}", size, RANK, local_device_ids=[0], initialization_timeout=40
    )
    mesh = jax.make_mesh((size,), ("ranks",))
    spec = jax.sharding.PartitionSpec("ranks")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    values = jax.make_array_from_process_local_data(sharding, normals()[None])
    mapped = partial(
        jax.shard_map, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()
    )
    total = jax.jit(mapped(lambda x: jax.lax.psum(x, "ranks")))(values)
    out = sample(total.addressable_shards[0].data[0])
    jax.distributed.shutdown()
    return out


def main() -> None:
    steps, ways = int(sys.argv[1]), sys.argv[2:]
    if ways == ["psum"]:
        print(json.dumps({"sum": psum()}), flush=True)
        return
    ringjax.init()
    found: dict[str, Any] = {way: WAYS[way](steps) for way in ways}
    total = ringjax.allreduce(normals(), ringjax.Sum, name="normals")
    found |= {"sum": sample(total), "nccl": gpu_ranks.uses_nccl()}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
