"""A rank of test_lost_rank.py: loses its last rank and continues without that rank.

The survivors must get an error that names the lost rank, leave, form a smaller world
and continue to train.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from support import gpu_ranks

RANK, SIZE = gpu_ranks.separate_host_of_job(), int(os.environ["RINGJAX_SIZE"])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import ringjax  # noqa: E402


def say(text: str) -> None:
    """Prints a line for the test in one write."""
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()


def make_step() -> Any:
    """Returns a new program: a program of a past epoch must not be used again."""
    tx = optax.chain(ringjax.allreduce_grads(overlap=True), optax.sgd(0.01))

    @jax.jit
    def step(parameters: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(parameters)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(parameters, updates), state

    return tx, step


def train(parameters: Any, steps: int) -> Any:
    """Trains some steps on data of this rank; waits for each step."""
    tx, step = make_step()
    state = tx.init(parameters)
    x = jnp.full((8, 64), ringjax.rank() + 1.0, jnp.float32)
    for number in range(steps):
        parameters, state = step(parameters, state, x)
        jax.block_until_ready(parameters)
        if number == 3:
            say("training")
    return parameters


def main() -> None:
    ringjax.init()
    parameters: Any = {
        "w": jnp.ones((64, 64), jnp.float32),
        "b": jnp.zeros(64, jnp.float32),
    }
    saved = train(parameters, 5)
    try:
        train(saved, 10**9)
    except Exception as error:
        say(f"caught {time.time()} {' '.join(str(error).split())}")
    ringjax.shutdown()
    smaller = SIZE - 1
    os.environ["RINGJAX_SIZE"] = str(smaller)
    os.environ["RINGJAX_JOB"] = os.environ["RINGJAX_JOB"][::-1]
    ringjax.init()
    assert (ringjax.rank(), ringjax.size()) == (RANK, smaller)
    trained = train(saved, 5)
    assert all(np.isfinite(v).all() for v in jax.tree.leaves(jax.device_get(trained)))
    total = float(ringjax.allreduce(jnp.float32(RANK + 1), ringjax.Sum))
    assert total == smaller * (smaller + 1) / 2, total
    say(f"re-formed {time.time()} {ringjax.size()}")
    ringjax.shutdown()


if __name__ == "__main__":
    main()
