"""The cost of adding a piece to exact sums: python -m benchmarks.exact_sums.

The ratios are to a plain addition of float32 in place, in one compiled loop each. All
take turns. Numbers are medians of all rounds, for sums in the cache and in memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ringjax.exact import Accumulator, Sums, fixed_point

SIZES = (1 << 16, 1 << 24)  # elements: 0.5 MiB and 128 MiB of sums
ELEMENTS = 1 << 25  # added in a turn
SUMS = Sums(pieces=12)
Add = Callable[[Any, jax.Array], Any]


def _plain(total: jax.Array, values: jax.Array) -> jax.Array:
    return total + values


def _exact(total: Accumulator, values: jax.Array) -> Accumulator:
    return SUMS.add(total, values, jnp.zeros(1, jnp.int32))


def _by_xla(total: tuple[jax.Array, ...], values: jax.Array) -> Any:
    units = fixed_point.units(jnp.zeros(1, jnp.int32), SUMS.pieces)
    width = fixed_point.width(SUMS.pieces)
    return fixed_point.add_leaves(*total, units, values, width=width)


def _cases(size: int) -> dict[str, tuple[Add, Any, jax.Array]]:
    values = jax.random.normal(jax.random.key(0), (size,))
    total = SUMS.zeros(values)
    parts = (total.words, total.counts, total.top, total.checksum)
    return {
        "plain float32": (_plain, values, values),
        "exact float32": (_exact, total, values),
        "exact bfloat16": (_exact, total, values.astype(jnp.bfloat16)),
        "exact float16": (_exact, total, values.astype(jnp.float16)),
        "float32 by XLA": (_by_xla, parts, values),
    }


def _loop(add: Add, times: int) -> Callable[[Any, jax.Array], Any]:
    def run(total: Any, values: jax.Array) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, t: add(t, values), total)

    return jax.jit(run, donate_argnums=0)


def measured(size: int, rounds: int) -> dict[str, float]:
    """Returns the seconds of one addition by variant, medians of `rounds`."""
    times = max(1, ELEMENTS // size)
    cases = _cases(size)
    loops = {name: _loop(add, times) for name, (add, _, _) in cases.items()}
    totals = {name: jax.tree.map(jnp.copy, t) for name, (_, t, _) in cases.items()}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):  # the first one compiles
        for name, (_, _, values) in cases.items():
            began = time.perf_counter()
            totals[name] = jax.block_until_ready(loops[name](totals[name], values))
            if turn:
                seconds[name].append((time.perf_counter() - began) / times)
    return {name: statistics.median(found) for name, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for size in options.sizes:
        found = measured(size, options.rounds)
        for name, seconds in found.items():
            ratio = seconds / found["plain float32"]
            print(
                f"{size:>10,}  {name:15} {1e9 * seconds / size:6.3f} ns  {ratio:5.2f}"
            )


if __name__ == "__main__":
    main()
