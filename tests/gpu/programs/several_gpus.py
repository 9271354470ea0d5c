"""A rank of test_several_gpus.py: trains on several devices and on one.

The argument is the number of GPUs of this machine, or 0 for two devices of the CPU. The
rank prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from support import gpu_ranks

RANK, COUNT = gpu_ranks.separate_host_of_job(), int(sys.argv[1])
STEPS, ROWS, WIDTH = 10, 16, 256

if COUNT:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu_ranks.visible_devices(COUNT, RANK)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import ringjax  # noqa: E402


def draw_parameters() -> dict[str, Any]:
    """Returns matrices, vectors, a number, and sizes that cannot be divided evenly."""
    rng = np.random.default_rng(0)
    shapes = {"in": (WIDTH, WIDTH), "bias": (WIDTH,), "out": (WIDTH, 8), "odd": (3, 5)}
    drawn = {name: rng.normal(size=s) / WIDTH**0.5 for name, s in shapes.items()}
    parameters = {name: x.astype(np.float32) for name, x in drawn.items()}
    return {**parameters, "scale": np.float32(1)}


def batch(rank: int, step: int) -> Any:
    """Returns the rows of a rank in a step."""
    rng = np.random.default_rng([rank, step])
    return rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


def train(transform: Any, params: Any, rows_of: Any) -> Any:
    """Returns the parameters after some steps; `rows_of` makes the batch of a step."""
    tx = optax.chain(transform, optax.sgd(0.05, 0.9))

    def loss(p: Mapping[str, Any], x: Any) -> Any:
        hidden = jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"]
        return (jnp.sin(hidden) * p["scale"]).mean() + (p["odd"] ** 2).sum()

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for number in range(STEPS):
        params, state = jax.block_until_ready(step(params, state, rows_of(number)))
    return params


def compare(sharded: bool) -> dict[str, Any]:
    """Trains on all devices, and on one device with the data of all ranks.

    Returns:
      The largest error relative to the largest parameter, a digest of all bits, and
      whether devices that hold equal shards hold equal bits.
    """
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("d",))  # Auto axes
    rows = NamedSharding(mesh, PartitionSpec("d"))
    whole = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Any:
        divides = np.ndim(x) and len(x) % mesh.size == 0
        return jax.device_put(x, rows if sharded and divides else whole)

    def own_rows(step: int) -> Any:
        return jax.device_put(batch(ringjax.rank(), step), rows)

    def all_rows(step: int) -> Any:
        return np.concatenate([batch(rank, step) for rank in range(ringjax.size())])

    parameters = jax.tree.map(place, draw_parameters())
    got = train(ringjax.allreduce_grads(), parameters, own_rows)
    want = jax.device_get(train(optax.identity(), draw_parameters(), all_rows))
    error, same = 0.0, True
    for key, theirs in want.items():
        ours = np.asarray(got[key])
        error = max(error, float(abs(ours - theirs).max() / abs(theirs).max()))
        seen: dict[str, bytes] = {}
        for shard in got[key].addressable_shards:
            data = np.asarray(shard.data).tobytes()
            same &= seen.setdefault(str(shard.index), data) == data
    return {"error": error, "digest": gpu_ranks.digest(got), "same": same}


if __name__ == "__main__":
    if not COUNT:
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    ringjax.init()
    found = {name: compare(name == "sharded") for name in ("sharded", "replicated")}
    print(json.dumps(found | {"devices": jax.local_device_count()}), flush=True)
    ringjax.shutdown()
