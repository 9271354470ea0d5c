"""Times one collective by size: `ringrun -np 4 python -m ringjax.bench allreduce`.

Prints columns as nccl-tests does; every result is first checked against numpy. Not a
comparison with other libraries: that is benchmarks/ in the checkout. algbw is size over
time, busbw the least that the busiest link must have carried, over time: see P.
Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69 (2009).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax import collectives, ops, runtime
from ringjax.settings.version import version

REDUCING, IN_PLACE = ("allreduce", "reducescatter"), ("allreduce", "broadcast")
COLLECTIVES = (*REDUCING, "allgather", "broadcast", "alltoall", "barrier")
OPS = ("Sum", "Average", "Min", "Max", "Product")
DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "f16": "float16",
    "bf16": "bfloat16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
}
FIELDS = ("size", "count", "dtype", "median", "min", "algbw", "busbw", "algorithm")
UNITS = ("B", "elements", "", "us", "us", "GB/s", "GB/s", "")
COLUMNS = "{:>12} {:>12} {:>6} {:>10} {:>10} {:>8} {:>8}  {}"


def parse_size(text: str) -> int:
    """Bytes of ``4096``, ``4K``, ``64MiB`` or ``1g``; units are powers of 1024."""
    match = re.fullmatch(r"(\d+)(?:([KMG])(?:I?B)?|B)?", text.strip().upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 4096, 4K or 64M")
    return int(match[1]) << {None: 0, "K": 10, "M": 20, "G": 30}[match[2]]


def size_steps(first: int, last: int, factor: int) -> list[int]:
    """`first`, times `factor`, again, … and never beyond `last`."""
    return [first, *size_steps(first * factor, last, factor)] if first <= last else []


def bus_factor(collective: str, ranks: int) -> float:
    """Bytes over the busiest link for each byte of size, at the least."""
    if collective == "allreduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("allgather", "reducescatter", "alltoall"):
        return (ranks - 1) / ranks
    return 1.0 if ranks > 1 else 0.0


def tensor(collective: str, rank: int, ranks: int, count: int, dtype: Any) -> Any:
    """What `rank` passes, in numpy; `count` elements are the size that is reported."""
    own = count // ranks if collective == "allgather" else count
    # Small integers: exact in every dtype, also as a sum or a product over the ranks.
    cycle = 2 if collective in REDUCING else 7
    return ((np.arange(own) + 3 * rank) % cycle + 1).astype(dtype)


def expected(
    collective: str, op: str, rank: int, ranks: int, count: int, dtype: Any
) -> Any:
    """What `rank` must get, in numpy."""
    if collective == "broadcast":
        return tensor(collective, 0, ranks, count, dtype)
    inputs = (tensor(collective, r, ranks, count, dtype) for r in range(ranks))
    mine = slice(rank * (count // ranks), (rank + 1) * (count // ranks))
    if collective == "allgather":
        return np.concatenate(list(inputs))
    if collective == "alltoall":
        return np.concatenate([x[mine] for x in inputs])
    wide = np.float64 if jnp.issubdtype(dtype, jnp.floating) else dtype
    total = next(inputs).astype(wide)
    merge = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}
    for other in inputs:
        total = merge.get(op, np.add)(total, other.astype(wide))
    if op == "Average":
        total = total / ranks if wide is np.float64 else total // ranks
    return (total if collective == "allreduce" else total[mine]).astype(dtype)


def check(got: Any, want: Any, what: str) -> None:
    """Raises ArithmeticError, naming the first element that is wrong."""
    rounds = jnp.issubdtype(want.dtype, jnp.floating)
    tolerance = 4 * float(jnp.finfo(want.dtype).eps) if rounds else 0.0
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    if got.shape != want.shape:
        raise ArithmeticError(f"{what}: shape {got.shape}, expected {want.shape}")
    right = np.isclose(got, want, rtol=tolerance, atol=0)
    if not right.all():
        i = int(np.argmin(right))
        raise ArithmeticError(f"{what}: element {i} is {got[i]}, expected {want[i]}")


class Bench:
    """One collective in one mode: makes the call, checks it, times it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.collective, self.barrier = options.collective, options.barrier
        self.dtype = jnp.dtype(DTYPES[options.dtype])
        self.rank, self.ranks = runtime.rank(), runtime.size()
        function = getattr(collectives, self.collective)
        takes: dict[str, Any] = {"broadcast": {"root_rank": 0}}
        takes |= {name: {"op": getattr(ops, options.op)} for name in REDUCING}
        arguments = takes.get(self.collective, {})

        def call(x: Any) -> Any:
            if self.barrier:
                return function() or x
            return function(x, **arguments)

        self.call: Callable[[Any], Any] = call
        if options.mode != "eager":
            donated = (0,) if options.mode == "donated" else ()
            self.call = jax.jit(self.call, donate_argnums=donated)

    def row(self, size: int) -> dict[str, Any]:
        """Checks and times one size; every rank must call it."""
        count = self.ranks * max(1, size // self.dtype.itemsize // self.ranks)
        about = (self.collective, self.rank, self.ranks, count, self.dtype)
        values = tensor(*about)
        result = self._step(jnp.asarray(values))
        if not self.barrier:
            want = expected(self.collective, self.options.op, *about[1:])
            what = f"ringjax.bench: rank {self.rank}: {self.collective} of {size} B"
            check(result, want, what)
        del result
        before = self._algorithms()
        # So many calls that the clock does not count; the same on all ranks.
        calls = max(1, min(50, (256 << 10) // size))
        times = self._times(jnp.asarray(values), calls)
        used = [a for a, n in self._algorithms().items() if n > before.get(a, 0)]
        size = 0 if self.barrier else count * self.dtype.itemsize
        median = statistics.median(times)
        algbw = size / median / 1e9
        busbw = algbw * bus_factor(self.collective, self.ranks)
        dtype, count = self.options.dtype, size // self.dtype.itemsize
        rates = (median * 1e6, min(times) * 1e6, algbw, busbw)
        row = (size, count, dtype, *rates, "+".join(used))
        return dict(zip(FIELDS, row, strict=True))

    def _step(self, x: Any) -> Any:
        out = jax.block_until_ready(self.call(x))
        if self.barrier:  # what it returned does not wait for it
            jax.effects_barrier()
        return out

    def _times(self, x: Any, calls: int) -> list[float]:
        """Seconds per call, one number for each batch, of the rank that took longest.

        The slowest rank counts: the root of a broadcast is done before the others.
        """
        mine = []
        for batch in range(-self.options.warmup, self.options.batches):
            collectives.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                out = self._step(x)
                x = out if self.options.mode == "donated" else x
            if batch >= 0:
                mine.append((time.perf_counter() - start) / calls)
        slowest = collectives.allreduce(jnp.asarray(mine, jnp.float32), ops.Max)
        return [float(t) for t in slowest]

    def _algorithms(self) -> dict[str, int]:
        stats = runtime.communicator(op="bench").stats().get(self.collective, {})
        return dict(stats.get("algorithms", {}))


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    values = [f"{v:.3f}" if isinstance(v, float) else v for v in row.values()]
    return COLUMNS.format(*values).rstrip()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ends the process with a message if they are wrong."""
    p = argparse.ArgumentParser(prog="ringjax.bench", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("collective", choices=COLLECTIVES)
    p.add_argument("-b", "--begin", type=parse_size, default="4K", help="smallest size")
    p.add_argument("-e", "--end", type=parse_size, default="64M", help="largest size")
    p.add_argument("-f", "--factor", type=int, default=4, help="from size to size")
    p.add_argument("-n", "--batches", type=int, default=21, help="timed, per size")
    p.add_argument("-w", "--warmup", type=int, default=3, help="batches before them")
    p.add_argument("--dtype", choices=DTYPES, default="f32")
    p.add_argument("--op", choices=OPS, default="Sum", help="of reductions")
    modes = p.add_mutually_exclusive_group()
    for mode in ("jit", "eager", "donated"):
        modes.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode)
    p.add_argument("--json", type=Path, help="a file for the rows; rank 0 writes it")
    p.set_defaults(mode="jit")
    options = p.parse_args(words)
    if options.factor < 2 or options.batches < 1 or options.warmup < 1:
        p.error("--factor must be 2 or more, --batches and --warmup 1 or more")
    if options.begin > options.end:
        p.error("--begin is larger than --end")
    if options.mode == "donated" and options.collective not in IN_PLACE:
        p.error(f"--donated is for what works in place: {' and '.join(IN_PLACE)}")
    options.barrier = options.collective == "barrier"
    return options


def main(words: Sequence[str] | None = None) -> None:
    """Runs the benchmark on this rank; rank 0 prints the table."""
    options = parse(words)
    if DTYPES[options.dtype].endswith("64"):
        jax.config.update("jax_enable_x64", True)
    runtime.init()
    talks = runtime.rank() == 0
    bench = Bench(options)
    about: dict[str, Any] = {
        "ringjax": version(),
        "jax": jax.__version__,
        "ranks": runtime.size(),
        "hosts": runtime.cross_size(),
        **{k: getattr(options, k) for k in ("collective", "op", "mode")},
    }
    if talks:
        print("#", ", ".join(f"{k} {v}" for k, v in about.items()))
        print(COLUMNS.format(*FIELDS), COLUMNS.format(*UNITS), sep="\n", flush=True)
    sizes = size_steps(options.begin, options.end, options.factor)
    rows = []
    for size in sizes[:1] if options.barrier else sizes:  # a barrier has no size
        rows.append(bench.row(size))
        if talks:
            print(line(rows[-1]), flush=True)
    if talks and options.json:
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    runtime.shutdown()


if __name__ == "__main__":
    main()
