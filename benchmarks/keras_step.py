"""Steps of a Keras model on two ranks, backend by backend: `-m benchmarks.keras_step`.

A model of more than 160 variables trains by `model.fit`, with a plain optimizer and
with a distributed one, in turns. What is more in the second kind is communication, as
much of it as the rest of a step does not hide. Beside it the same layers in a loop of
PyTorch with `ringjax.torch`. The first kind trains on both ranks, too, so that the
memory and the cores are shared alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

LAYERS, WIDTH, BATCH = 82, 128, 32
KINDS = ("torch adapter", "keras jax", "keras torch", "keras tensorflow")
Turn = Callable[[], float]  # seconds of a step


def of_torch() -> tuple[Turn, Turn]:
    """A plain loop of PyTorch, and one with a distributed optimizer."""
    import torch

    import ringjax.torch as hvd

    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))
    x = torch.randn(BATCH, WIDTH)

    def turn(together: bool) -> Turn:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        if together:
            named = model.named_parameters()
            optimizer = hvd.DistributedOptimizer(optimizer, named)

        def run() -> float:
            started = time.perf_counter()
            for _ in range(OPTIONS.steps):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            return (time.perf_counter() - started) / OPTIONS.steps

        return run

    return turn(False), turn(True)


def of_keras() -> tuple[Turn, Turn]:
    """`model.fit` with a plain optimizer, and with a distributed one."""
    import keras
    import numpy as np

    import ringjax.keras as hvd

    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))
    rows = BATCH * OPTIONS.steps
    x = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype("float32")

    def turn(together: bool) -> Turn:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(WIDTH) for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
        if together:
            optimizer = hvd.DistributedOptimizer(optimizer)
        model.compile(optimizer, "mse")

        def run() -> float:
            started = time.perf_counter()
            model.fit(x, x, batch_size=BATCH, shuffle=False, verbose=0)
            return (time.perf_counter() - started) / OPTIONS.steps

        return run

    return turn(False), turn(True)


def measure(kind: str) -> None:
    """In a rank: takes turns, and rank 0 prints the seconds of each as JSON."""
    import ringjax
    from ringjax import eager

    ringjax.init()
    turns = of_torch() if kind == KINDS[0] else of_keras()
    found: list[list[float]] = [[], []]
    for number in range(OPTIONS.rounds + 1):
        for turn, seconds in zip(turns, found, strict=True):
            eager.barrier()
            spent = turn()
            if number:  # the first one compiles
                seconds.append(spent)
    if ringjax.rank() == 0:
        print(json.dumps(found))


def table(results: dict[str, list[list[float]]]) -> str:
    """Milliseconds of a step: alone, together, the difference."""
    lines = [f"{'ms':18} {'alone':>8} {'together':>9} {'more':>14}"]
    for kind, (alone, together) in results.items():
        more = [1e3 * (b - a) for a, b in zip(alone, together, strict=True)]
        low, high = min(more), max(more)
        middle = statistics.median(more)
        lines.append(
            f"{kind:18} {1e3 * statistics.median(alone):8.2f} "
            f"{1e3 * statistics.median(together):9.2f} "
            f"{middle:8.2f} ({low:.2f} .. {high:.2f})"
        )
    return "\n".join(lines)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="benchmarks.keras_step", description=__doc__)
    p.add_argument("-np", dest="ranks", type=int, default=2)
    p.add_argument("--rounds", type=int, default=7, help="turns of each kind (7)")
    p.add_argument("--steps", type=int, default=30, help="of one turn (30)")
    p.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    p.add_argument("--rank", choices=KINDS, help=argparse.SUPPRESS)
    return p.parse_args(words)


def main() -> None:
    """Starts the ranks of one kind after the other, and prints the table."""
    if OPTIONS.rank:
        measure(OPTIONS.rank)
        return
    numbers = 2 * LAYERS, LAYERS * (WIDTH + 1) * WIDTH / 1e6
    print(
        f"# {OPTIONS.ranks} ranks, {numbers[0]} variables, {numbers[1]:.1f} M numbers"
    )
    results = {}
    for kind in OPTIONS.kinds:
        words = [sys.executable, "-m", "ringjax.run", "-np", str(OPTIONS.ranks)]
        words += [sys.executable, "-m", "benchmarks.keras_step", "--rank", kind]
        words += ["--rounds", str(OPTIONS.rounds), "--steps", str(OPTIONS.steps)]
        env = {**os.environ, "KERAS_BACKEND": kind.rpartition(" ")[2]}
        if kind == KINDS[0]:
            env.pop("KERAS_BACKEND")
        done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{kind}: exit code {done.returncode}")
        (line,) = (x for x in done.stdout.splitlines() if x.rstrip().endswith("]]"))
        results[kind] = json.loads(line[line.index("[[") :])
    print(table(results))


OPTIONS = parse() if __name__ == "__main__" else parse([])

if __name__ == "__main__":
    main()
