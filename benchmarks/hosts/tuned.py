"""What `ringjax.autotune` finds between hosts, as root: `-m benchmarks.hosts.tuned`.

A training step in hosts made of network namespaces: first the trials, then steps with
the default and with what was chosen in turns. The ratio is never above 1 but for noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.hosts.collectives import launch
from benchmarks.hosts.layouts import Layout, parse_rate
from benchmarks.hosts.namespaces import Namespaces

TURNS = 30


def rank(batch: int) -> None:
    """What each rank does; rank 0 prints its result as JSON."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import ringjax
    from benchmarks.hosts.rank import CLASSES, loss, parameters

    ringjax.init()
    make = np.random.default_rng(1 + ringjax.rank())
    images = jnp.asarray(make.normal(size=(batch, 32, 32, 3)), jnp.float32)
    labels = jnp.asarray(make.integers(0, CLASSES, batch))
    change = ringjax.allreduce_grads()

    def step(layers: Any, state: Any) -> Any:
        gradients = jax.grad(loss)(layers, images, labels)
        gradients, state = change.update(gradients, state)
        pairs = zip(layers, gradients, strict=True)
        return [layer - 1e-3 * g for layer, g in pairs], state

    tuned = ringjax.autotune(step, donate_argnums=(0, 1))
    usual = jax.jit(lambda *held: step(*held), donate_argnums=(0, 1))
    layers = parameters()
    held = layers, change.init(layers)
    while tuned._settled is None:
        held = tuned(*held)
    times: list[tuple[float, float]] = []
    for _ in range(TURNS + 2):
        pair = []
        for program in (usual, tuned):
            began = time.perf_counter()
            held = jax.block_until_ready(program(*held))
            pair.append(time.perf_counter() - began)
        times.append((pair[0], pair[1]))
    slowest = ringjax.eager.allreduce(np.array(times[2:]), op=ringjax.Max, name="times")
    if ringjax.rank() == 0:
        print(json.dumps({"times": slowest.tolist(), "setting": str(tuned.setting)}))
    ringjax.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", type=Layout.parse, default=Layout(2, 1))
    parser.add_argument("--rates", type=parse_rate, nargs="+", default=["1gbit"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="jobs at each rate")
    options = parser.parse_args()
    words = [sys.executable, "-c"]
    words += [f"from benchmarks.hosts import tuned; tuned.rank({options.batch})"]
    print("rate, chosen, default ms, chosen ms, ratio (quartiles)")
    for number, rate in enumerate(options.rates * options.rounds):
        with (
            tempfile.TemporaryDirectory() as folder,
            Namespaces(
                options.layout.hosts, rate, f"t{os.getpid():x}{number}"[-5:]
            ) as net,
        ):
            os.environ["RINGJAX_CACHE_DIR"] = str(Path(folder) / "cache")
            lines = launch(options.layout, net, words, Path(folder), 300.0)
        found = json.loads(next(line for line in lines if line.startswith("{")))
        ratios = [chosen / default for default, chosen in found["times"]]
        low, middle, high = statistics.quantiles(ratios)
        before, after = (
            statistics.median(c) for c in zip(*found["times"], strict=True)
        )
        print(
            f"{rate}, {found['setting']}, {before * 1e3:.1f}, {after * 1e3:.1f}, "
            f"{middle:.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
