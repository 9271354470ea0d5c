"""A short list of checks for two ranks: what a wheel does where the tests cannot run.

    ringrun -np 2 python two_ranks.py

Run by elsewhere.py, under an emulated processor for one, where importing jax alone
takes a minute. Not a test of ringjax, which tests/ is.
"""

from __future__ import annotations

import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ringjax


def eager() -> None:
    """Sums of the types whose code is chosen by the processor, and what moves."""
    for dtype in ("float16", "bfloat16", "float32", "float64", "int32"):
        mine = (np.arange(1000) % 16 + ringjax.rank()).astype(jnp.dtype(dtype))
        total = ringjax.eager.allreduce(mine, op=ringjax.Sum, name=dtype)
        wanted = 2 * (np.arange(1000) % 16) + 1
        np.testing.assert_array_equal(total.astype("f8"), wanted)
        assert total.dtype == mine.dtype
    mine = np.full((1 + ringjax.rank(), 2), ringjax.rank(), "f4")
    gathered = ringjax.eager.allgather(mine, name="rows")
    np.testing.assert_array_equal(gathered[:, 0], [0, 1, 1])
    one = ringjax.eager.broadcast(mine[:1], root_rank=1, name="one")
    np.testing.assert_array_equal(one, [[1, 1]])
    assert ringjax.broadcast_object({"of": "rank 0"}) == {"of": "rank 0"}
    large = np.full(1 << 20, ringjax.rank() + 1.0, "f4")
    assert float(ringjax.eager.allreduce(large, name="large")[-1]) == 1.5


def compiled() -> None:
    """Collectives inside of jit, and a training step."""
    x = jnp.arange(64.0) + ringjax.rank()
    total = jax.jit(lambda v: ringjax.allreduce(v, op=ringjax.Sum))(x)
    np.testing.assert_array_equal(total, 2 * np.arange(64.0) + 1)
    tx = optax.chain(ringjax.allreduce_grads(), optax.sgd(0.5))
    params = {"w": jnp.zeros(8), "b": jnp.zeros(3, jnp.bfloat16)}
    state = tx.init(params)

    @jax.jit
    def step(params: optax.Params, state: optax.OptState) -> Any:
        grads = jax.tree.map(lambda p: jnp.full_like(p, ringjax.rank() * 2.0), params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = step(params, state)
    for leaf in jax.tree.leaves(params):
        np.testing.assert_array_equal(leaf.astype("f4"), -1.5)


def main() -> None:
    """All of it."""
    ringjax.init()
    assert ringjax.size() == 2
    eager()
    compiled()
    ringjax.barrier()
    here = f"{platform.machine()}, Python {platform.python_version()}"
    print(f"rank {ringjax.rank()}: right ({here}, jax {jax.__version__})")


if __name__ == "__main__":
    main()
