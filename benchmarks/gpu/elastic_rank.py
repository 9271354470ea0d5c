"""One worker of an elastic job on a GPU: trains until FOLDER/stop exists.

elastic.py starts this program under ringrun. The gradients are powers of two, so that
the parameters show which ranks have contributed. The worker writes one line of JSON for
each commit.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import sharing

WORKER = int(os.environ["RINGJAX_WORKER"])
sharing.prepare(WORKER)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import ringjax  # noqa: E402
from benchmarks.gpu.section import device_communicator  # noqa: E402

SIZES = {"small": 5, "large": 1 << 19}  # small is packed, large is reduced in place
PLACES = 16  # most workers


def main() -> None:
    folder = Path(sys.argv[1])
    trace = (folder / f"{WORKER}.jsonl").open("a", buffering=1)

    def tell(**line: Any) -> None:
        trace.write(json.dumps({"t": time.monotonic(), **line}) + "\n")

    tell(event="started", pid=os.getpid())
    ringjax.init()
    tx = optax.chain(ringjax.allreduce_grads(ringjax.Sum), optax.sgd(1.0))
    zeros = {name: jnp.zeros(size, jnp.float32) for name, size in SIZES.items()}
    # The number of contributions of each worker travels with the gradients.
    params = {**zeros, "who": jnp.zeros(PLACES), "stop": jnp.zeros(())}
    state = ringjax.elastic.State(params=params, opt=tx.init(params), step=0)

    @jax.jit
    def step(params: Any, opt: Any, value: Any, who: Any, stop: Any) -> Any:
        grads = {name: jnp.full_like(x, -value) for name, x in params.items()}
        updates, opt = tx.update({**grads, "who": -who, "stop": -stop}, opt)
        return optax.apply_updates(params, updates), opt

    def advance(state: Any) -> None:
        stop = jnp.float32((folder / "stop").exists())
        values = jnp.float32(2.0**WORKER), jnp.zeros(PLACES).at[WORKER].set(1)
        state.params, state.opt = step(state.params, state.opt, *values, stop)

    @ringjax.elastic.run(warm_up=advance)
    def train(state: Any) -> None:
        while float(state.params["stop"]) < 1:
            before = np.asarray(state.params["who"])
            advance(state)
            state.step += 1
            state.commit()
            took_part = np.asarray(state.params["who"]) - before
            workers = np.flatnonzero(took_part).tolist()
            tell(event="step", step=state.step, workers=workers)
            assert set(took_part) <= {0, 1}, took_part
            time.sleep(0.02)

    train(state)
    who = np.asarray(state.params["who"])
    expected = float(who @ 2.0 ** np.arange(PLACES))
    for name in SIZES:
        got = np.asarray(state.params[name])
        assert (got == expected).all(), (name, got[:3], expected)
    tell(
        event="finished",
        step=state.step,
        expected=expected,
        programs=step._cache_size(),
        platform=jax.default_backend(),
        nccl=device_communicator() is not None,
    )
    ringjax.shutdown()


if __name__ == "__main__":
    main()
