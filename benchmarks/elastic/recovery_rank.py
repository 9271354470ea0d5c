"""One rank of recovery.py: times the calls that an elastic job makes dearer.

Prints one JSON object on rank 0: what -> microseconds, each the median of many.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ringjax

SIZES = {
    "allreduce of 4 B": 1,
    "allreduce of 16 KiB": 4096,
    "allreduce of 1 MiB": 1 << 18,
}
IN_ONE = 50  # calls in a compiled program, so that dispatch does not count


def main() -> None:
    ringjax.init()
    found = {}
    for what, size in SIZES.items():
        call = many(size)
        x = jnp.ones(size, jnp.float32)
        found[what] = median(lambda c=call, v=x: c(v)) / IN_ONE
    for samples in (8, 256):
        found[f"step, 1 MiB, {samples} samples"] = median(training_step(samples))
    state = ringjax.elastic.State(step=0, values=np.zeros(1000))
    found["State.commit"] = median(state.commit)
    if ringjax.rank() == 0:
        print(json.dumps(found))


def many(size: int) -> Callable[[jax.Array], jax.Array]:
    """A program of IN_ONE allreduces, one after the other."""

    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return ringjax.allreduce(x, op=ringjax.Average), None

    return jax.jit(lambda x: jax.lax.scan(body, x, None, length=IN_ONE)[0])


def training_step(samples: int) -> Callable[[], object]:
    """A step of a small dense network with the optimizer wrapper."""
    tx = optax.chain(ringjax.allreduce_grads(), optax.sgd(0.0))
    params = {f"layer{i}": jnp.ones((256, 256), jnp.float32) / 256 for i in range(4)}
    held = [params, tx.init(params)]
    x = jnp.ones((samples, 256), jnp.float32)

    def loss(p: dict[str, jax.Array]) -> jax.Array:
        y = x
        for weights in p.values():
            y = jnp.tanh(y @ weights)
        return jnp.sum(y**2)

    @jax.jit
    def step(
        params: dict[str, jax.Array], opt: optax.OptState
    ) -> tuple[object, object]:
        updates, opt = tx.update(jax.grad(loss)(params), opt)
        return optax.apply_updates(params, updates), opt

    def run() -> object:
        held[:] = step(*held)
        return held[0]

    return run


def median(call: Callable[[], object], repeats: int = 300) -> float:
    """Microseconds of a call, once it is compiled; all ranks begin together."""
    for _ in range(20):
        jax.block_until_ready(call())
    ringjax.barrier()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


main()
