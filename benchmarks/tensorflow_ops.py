"""What TensorFlow adds to a call of the core: `python -m benchmarks.tensorflow_ops`.

An eager allreduce beside the same one of `ringjax.eager`, in turns; and a step of a
`tf.function` with some allreduces (a *bucket* each) beside the same function without
them, with the calls of Python that a bucket takes. All in one run on every rank.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

BUCKETS = 16


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="benchmarks.tensorflow_ops",
        description="Microseconds that ringjax.tensorflow takes besides the core's.",
    )
    p.add_argument("-np", dest="ranks", type=int, default=2, help="ranks (2)")
    p.add_argument("--elements", type=int, default=1024, help="float32 of each (1024)")
    p.add_argument("--rounds", type=int, default=9, help="turns of every variant (9)")
    p.add_argument("--calls", type=int, default=300, help="calls of one turn (300)")
    p.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = p.parse_args(words)
    if min(options.ranks, options.elements, options.rounds, options.calls) < 1:
        p.error("all numbers must be 1 or more")
    return options


def in_turns(
    variants: dict[str, Callable[[], Any]], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Microseconds of a call of each variant, round by round."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        for _ in range(20):
            call()
    for _ in range(rounds):
        for name, call in variants.items():
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            found[name].append((time.perf_counter() - begin) / calls * 1e6)
    return found


def counted(module: Any, names: Sequence[str]) -> dict[str, int]:
    """Counts from now on how often TensorFlow or a thread calls these functions."""
    counts = dict.fromkeys(names, 0)

    def count(name: str) -> None:
        function = getattr(module, name)

        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        setattr(module, name, call)

    for name in names:
        count(name)
    return counts


def measure(options: argparse.Namespace) -> str:
    import numpy as np
    import tensorflow as tf

    import ringjax.tensorflow as hvd
    from ringjax import eager
    from ringjax.tensorflow import kernels, pending_operations

    counts = [
        counted(kernels, ["_start", "_finish"]),
        counted(pending_operations.PendingOperation, ["notify"]),
    ]

    def python_calls() -> int:
        return sum(sum(of.values()) for of in counts)

    hvd.init()
    array = np.ones(options.elements, np.float32)
    tensor = tf.constant(array)

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        return [hvd.allreduce(x * i, op=hvd.Sum) for i in range(BUCKETS)]

    @tf.function(autograph=False)
    def plain(x: Any) -> Any:
        return [tf.identity(x * i) for i in range(BUCKETS)]

    variants: dict[str, Callable[[], Any]] = {
        "core": lambda: eager.allreduce(array, hvd.Sum, name="core"),
        "eager": lambda: hvd.allreduce(tensor, op=hvd.Sum, name="eager"),
    }
    found = in_turns(variants, options.rounds, options.calls)
    before = python_calls()
    graphs = {"step": lambda: step(tensor), "plain": lambda: plain(tensor)}
    calls = max(1, options.calls // 10)
    found |= in_turns(graphs, options.rounds, calls)
    python = (python_calls() - before) / (options.rounds * calls + 20) / BUCKETS
    middle = {name: statistics.median(values) for name, values in found.items()}
    more = [b - a for a, b in zip(found["core"], found["eager"], strict=True)]
    each = [
        (b - a) / BUCKETS for a, b in zip(found["plain"], found["step"], strict=True)
    ]
    return "\n".join(
        [
            f"{hvd.size()} ranks, {options.elements} float32, microseconds",
            f"core's eager call          {middle['core']:10.1f}",
            f"TensorFlow's eager call    {middle['eager']:10.1f}",
            f"  more (at most 60)        {statistics.median(more):10.1f}",
            f"a step of {BUCKETS} buckets       {middle['step']:10.1f}",
            f"the same without           {middle['plain']:10.1f}",
            f"  more for each bucket     {statistics.median(each):10.1f}",
            f"  calls of Python (<= 3)   {python:10.1f}",
        ]
    )


def main(words: Sequence[str] | None = None) -> int:
    """Starts the ranks, or is one of them."""
    options = parse(words)
    if options.rank:
        table = measure(options)
        import ringjax

        if ringjax.rank() == 0:
            print(table, flush=True)
        return 0
    numbers = {n: getattr(options, n) for n in ("elements", "rounds", "calls")}
    given = [word for n, value in numbers.items() for word in (f"--{n}", str(value))]
    python = [sys.executable, "-m"]
    ringrun = [*python, "ringjax.run", "-np", str(options.ranks)]
    rank = [*python, "benchmarks.tensorflow_ops", "--rank", *given]
    return subprocess.run([*ringrun, *rank], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
