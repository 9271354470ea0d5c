"""The exchange of exact sums against an allreduce of float32, by size and in turns.

    ringrun -np 4 python -m benchmarks.exact_exchange --sizes 64K 1M 64M

Sizes are those of the mean, 4 bytes an element. The exchange sends 1.5 times the bytes
of the allreduce. Each round runs one batch of calls of either kind, so that other work
of the machine slows both equally. A batch takes as long as on its slowest rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import ringjax
from ringjax import _native, eager, runtime
from ringjax.bench import parse_size
from ringjax.collectives.exchange import exchange

BATCH_SECONDS = 0.02
SUM = _native.REDUCE_OPS["Sum"]


def arrays(elements: int) -> list[np.ndarray]:
    """Returns sums of 1, control numbers, maxima, units and the checksum."""
    # The checksum of ones: their number, and the sum of the first odd numbers.
    checksum = np.array([elements, elements**2], np.uint64).view(np.uint32)
    small = [np.zeros(n, np.int32) for n in (16, 16, 1)]
    return [np.ones(elements, np.int64), *small, checksum]


def native(elements: int) -> list[Callable[[], object]]:
    """Returns both calls of the native core, on arrays of numpy."""
    execute, codes = runtime.communicator().execute, _native.COLLECTIVES
    given, result = np.ones(elements, np.float32), np.empty(elements, np.float32)
    ins = arrays(elements)
    outs = [np.empty_like(given), *(x.copy() for x in ins[1:])]
    counts = [1, elements]
    return [
        lambda: execute(codes["allreduce"], SUM, [given], [result]),
        lambda: execute(codes["exchange"], SUM, ins, outs, counts=counts),
    ]


def compiled(elements: int) -> list[Callable[[], object]]:
    """Returns both calls, each as a program of jit."""
    sums, *small = arrays(elements)
    words = sums.view(np.uint32).reshape(-1, 2)
    given = [jnp.asarray(x) for x in (words, *small)]
    plain = jax.jit(lambda x: ringjax.allreduce(x, ringjax.Sum))
    exact = jax.jit(lambda *x: exchange(*x, sizes=(elements,), pieces=1)[0])
    ones = jnp.ones(elements, jnp.float32)
    return [
        lambda: plain(ones).block_until_ready(),
        lambda: exact(*given).block_until_ready(),
    ]


def seconds(call: Callable[[], object], calls: int) -> np.ndarray:
    """Returns the time and the CPU time of one call, as the slowest rank sees them."""
    ringjax.barrier()
    begin = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    now = time.perf_counter(), time.process_time()
    spent = np.subtract(now, begin) / calls
    return eager.allreduce(spent, op=ringjax.Max, name="spent")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    sizes = [64 << 10 << 2 * step for step in range(6)]
    p.add_argument("--sizes", nargs="+", type=parse_size, default=sizes)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--jit", action="store_true", help="programs, not the native core")
    options = p.parse_args()
    ringjax.init()
    for size in options.sizes:
        calls = (compiled if options.jit else native)(size // 4)
        first = max(seconds(call, 2)[0] for call in calls)
        batch = max(1, round(BATCH_SECONDS / first))
        turns = [[seconds(c, batch) for c in calls] for _ in range(options.rounds)]
        (plain, _), (exact, _) = np.median(turns, axis=0)
        ratio, cpu = np.median([x / p for p, x in turns], axis=0)
        if ringjax.rank() == 0:
            print(
                f"{size >> 10:>7} KiB  allreduce {plain * 1e6:>9.1f} us  exchange "
                f"{exact * 1e6:>9.1f} us  ratio {ratio:.2f}  CPU {cpu:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
