"""A worker of test_elastic.py: trains until the file that it is told exists.

The gradients are powers of two, so the parameters show which ranks have contributed.
The worker prints one line of JSON for each commit.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from support import gpu_ranks

WORKER = gpu_ranks.separate_host_of_job()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import ringjax  # noqa: E402

SIZES = {"small": 5, "large": 1 << 19}  # small is packed, large is reduced in place
MAX_WORKERS = 16


def say(**line: Any) -> None:
    print(json.dumps({"time": time.monotonic(), **line}), flush=True)


def main() -> None:
    stop_file = Path(sys.argv[1])
    ringjax.init()
    tx = optax.chain(ringjax.allreduce_grads(ringjax.Sum), optax.sgd(1.0))
    zeros = {name: jnp.zeros(size, jnp.float32) for name, size in SIZES.items()}
    # The number of contributions of each worker travels with the gradients.
    params = {**zeros, "workers": jnp.zeros(MAX_WORKERS), "stop": jnp.zeros(())}
    state = ringjax.elastic.State(params=params, opt=tx.init(params), step=0)

    @jax.jit
    def step(params: Any, opt: Any, value: Any, workers: Any, stop: Any) -> Any:
        grads = {name: jnp.full_like(x, -value) for name, x in params.items()}
        updates, opt = tx.update({**grads, "workers": -workers, "stop": -stop}, opt)
        return optax.apply_updates(params, updates), opt

    def advance(state: Any) -> None:
        stop = jnp.float32(stop_file.exists())
        values = jnp.float32(2.0**WORKER), jnp.zeros(MAX_WORKERS).at[WORKER].set(1)
        state.params, state.opt = step(state.params, state.opt, *values, stop)

    @ringjax.elastic.run(warm_up=advance)
    def train(state: Any) -> None:
        while float(state.params["stop"]) < 1:
            before = np.asarray(state.params["workers"])
            advance(state)
            state.step += 1
            state.commit()
            contributions = np.asarray(state.params["workers"]) - before
            workers = np.flatnonzero(contributions).tolist()
            say(event="step", workers=workers)
            assert set(contributions) <= {0, 1}, contributions
            time.sleep(0.02)

    train(state)
    expected = float(
        np.asarray(state.params["workers"]) @ 2.0 ** np.arange(MAX_WORKERS)
    )
    for name in SIZES:
        got = np.asarray(state.params[name])
        assert (got == expected).all(), (name, got[:3], expected)
    say(
        event="finished",
        step=state.step,
        expected=expected,
        programs=step._cache_size(),
        nccl=gpu_ranks.uses_nccl(),
    )
    ringjax.shutdown()


if __name__ == "__main__":
    main()
