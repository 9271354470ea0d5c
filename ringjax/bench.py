"""Times one collective by size: `ringrun -np 4 python -m ringjax.bench allreduce`.

Checks every result against numpy, and prints columns as nccl-tests does. JAX chooses
the device of the arrays: the GPU of each rank if it has one. algbw is size over time.
busbw is the smallest number of bytes that the busiest link must carry, over time: see
P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69 (2009). limit is
the busbw that the machine allows: on one host, that of a plain copy that all ranks make
at the same time; between hosts, that of the network, measured when the job started. The
folder benchmarks/ of the checkout compares ringjax with other libraries.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax import collectives, ops, runtime, sync
from ringjax.control.objects import Array
from ringjax.ops import bus_factor
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
FIELDS = (
    *("size", "count", "dtype", "median", "min", "p99"),
    *("algbw", "busbw", "limit", "algorithm"),
)
UNITS = ("B", "elements", "", "us", "us", "us", "GB/s", "GB/s", "GB/s", "")
COLUMNS = "{:>11} {:>11} {:>5} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7}  {}"
NOISY = 0.25  # distance of quartiles, as a share of the median, that marks a row
_FASTER = 0.9  # a row below this share of a smaller size's time is marked
MARKS = {
    "*": f"the quartiles of the batches are more than {NOISY:.0%} of the median apart: "
    "something else runs here; try -n 101",
    "^": "faster than a smaller size above, so one of the two was disturbed",
}


def parse_size(text: str) -> int:
    """Parses ``4096``, ``4K``, ``64MiB`` or ``1g``, with powers of 1024, to bytes."""
    match = re.fullmatch(r"(\d+)(?:([KMG])(?:I?B)?|B)?", text.strip().upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 4096, 4K or 64M")
    return int(match[1]) << {None: 0, "K": 10, "M": 20, "G": 30}[match[2]]


def size_steps(first: int, last: int, factor: int) -> list[int]:
    """Returns `first`, `first * factor`, and so on up to `last`."""
    return [first, *size_steps(first * factor, last, factor)] if first <= last else []


def tensor(
    collective: str, rank: int, ranks: int, count: int, dtype: np.dtype[Any]
) -> Array:
    """Returns the input of `rank` for a reported size of `count` elements."""
    own = count // ranks if collective == "allgather" else count
    # Small integers, so that sums and products over ranks are exact in every dtype.
    cycle = 2 if collective in REDUCING else 7
    return ((np.arange(own) + 3 * rank) % cycle + 1).astype(dtype)


def expected(
    collective: str, op: str, rank: int, ranks: int, count: int, dtype: np.dtype[Any]
) -> Array:
    """Returns the result that the collective must have on `rank`."""
    if collective == "broadcast":
        return tensor(collective, 0, ranks, count, dtype)
    inputs = (tensor(collective, r, ranks, count, dtype) for r in range(ranks))
    own = slice(rank * (count // ranks), (rank + 1) * (count // ranks))
    if collective == "allgather":
        return np.concatenate(list(inputs))
    if collective == "alltoall":
        return np.concatenate([x[own] for x in inputs])
    wide = np.float64 if jnp.issubdtype(dtype, jnp.floating) else dtype
    total = next(inputs).astype(wide)
    merge = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}
    for other in inputs:
        total = merge.get(op, np.add)(total, other.astype(wide))
    if op == "Average":
        total = total / ranks if wide is np.float64 else total // ranks
    return (total if collective == "allreduce" else total[own]).astype(dtype)


def check(result: jax.Array | Array, want: Array, what: str) -> None:
    """Raises ArithmeticError with the first wrong element, if there is one."""
    rounds = jnp.issubdtype(want.dtype, jnp.floating)
    tolerance = 4 * float(jnp.finfo(want.dtype).eps) if rounds else 0.0
    got, want = np.asarray(result, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ArithmeticError(f"{what}: shape {got.shape}, expected {want.shape}")
    right = np.isclose(got, want, rtol=tolerance, atol=0)
    if not right.all():
        i = int(np.argmin(right))
        raise ArithmeticError(f"{what}: element {i} is {got[i]}, expected {want[i]}")


class Bench:
    """Calls one collective in one mode, checks its results, and measures its time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.collective, self.barrier = options.collective, options.barrier
        self.dtype = jnp.dtype(DTYPES[options.dtype])
        self.rank, self.ranks = runtime.rank(), runtime.size()
        self.gpu = jax.local_devices()[0].platform != "cpu"
        self.limit = self._network_limit()
        function = getattr(collectives, self.collective)
        takes: dict[str, Any] = {"broadcast": {"root_rank": 0}}
        takes |= {name: {"op": getattr(ops, options.op)} for name in REDUCING}
        arguments = takes.get(self.collective, {})

        def call(x: jax.Array) -> Any:
            if self.barrier:
                return function() or x
            return function(x, **arguments)

        self.call: Callable[[jax.Array], Any] = call
        if options.mode != "eager":
            donated = (0,) if options.mode == "donated" else ()
            self.call = jax.jit(self.call, donate_argnums=donated)

    def measure(self, size: int) -> dict[str, Any]:
        """Checks and times one size. Every rank must call this.

        Returns a value, in the unit of UNITS, for each of FIELDS. The value is None if
        the collective has no such field.
        """
        # Some collectives divide the array evenly: round to a multiple of the ranks.
        count = self.ranks * max(1, size // self.dtype.itemsize // self.ranks)
        about = (self.collective, self.rank, self.ranks, count, self.dtype)
        values = tensor(*about)
        result = self._step(jnp.asarray(values))
        if not self.barrier:
            want = expected(self.collective, self.options.op, *about[1:])
            what = f"ringjax.bench: rank {self.rank}: {self.collective} of {size} B"
            check(result, want, what)
        del result  # free the memory of the result before the measurement
        before = self._algorithms()
        # Make so many calls that the cost of reading the clock is small. All ranks make
        # equally many calls.
        calls = max(1, min(50, (256 << 10) // size))
        size = 0 if self.barrier else count * self.dtype.itemsize
        copies = CopyBenchmark(size if self.limit is None and not self.gpu else 0)
        times, alone = self._times(jnp.asarray(values), calls, copies)
        used = [a for a, n in self._algorithms().items() if n > before.get(a, 0)]
        median = statistics.median(times)
        row = dict.fromkeys(FIELDS) | {
            "size": size,
            "count": size // self.dtype.itemsize,
            "dtype": self.options.dtype,
            "median": median * 1e6,
            "min": min(times) * 1e6,
            "p99": float(np.quantile(alone, 0.99, method="higher")) * 1e6,
            "spread": spread(times),
            "algorithm": "+".join(used),
        }
        if self.barrier:
            return row
        factor = bus_factor(self.collective, self.ranks)
        limit = self.limit
        if copies.times:
            limit = size / statistics.median(copies.times) / 1e9 * factor
        algbw = size / median / 1e9
        return row | {"algbw": algbw, "busbw": algbw * factor, "limit": limit}

    def _step(self, x: jax.Array) -> Any:
        out = jax.block_until_ready(self.call(x))
        if self.barrier:  # the result is the input, which is ready already
            jax.effects_barrier()
        return out

    def _times(
        self, x: jax.Array, calls: int, copies: CopyBenchmark
    ) -> tuple[list[float], list[float]]:
        """Measures the seconds of a call on the slowest rank.

        The slowest rank counts, because the root of a broadcast ends before the others.
        Returns the mean of each batch, and the time of each single call. A GPU queues
        calls, so its single times are the means, too. Sets `copies.times` if `copies`
        has a size.
        """
        means, single, copy_times = [], [], []
        for batch in range(-self.options.warmup, self.options.batches):
            collectives.barrier()
            ends = [time.perf_counter()]
            for _ in range(calls):
                out = self.call(x) if self.gpu else self._step(x)
                x = out if self.options.mode == "donated" else x
                ends.append(time.perf_counter())
            if self.gpu:
                # The calls were only queued, so only their mean has a meaning.
                jax.block_until_ready(out)
                ends = [ends[0], ends[0] + (time.perf_counter() - ends[0]) / calls]
            if batch >= 0:
                means.append((ends[-1] - ends[0]) / (len(ends) - 1))
                single += np.diff(ends).tolist()
            if copies.size:
                # All ranks copy at the same time, as in a collective.
                collectives.barrier()
                copy_times.append(copies.seconds(calls))
        seconds = jnp.asarray([*means, *single, *copy_times], jnp.float32)
        slowest = [float(t) for t in collectives.allreduce(seconds, ops.Max)]
        n, end = len(means), len(means) + len(single)
        copies.times = slowest[end:]
        return slowest[:n], slowest[n:end]

    def _network_limit(self) -> float | None:
        """Returns the busbw that the network allows, in GB/s.

        Assumes that each byte crosses the network once for all ranks of a host. Returns
        None on one host, or if the speed of the network is unknown.
        """
        hosts = runtime.communicator(op="bench").hosts
        here, count = hosts.count(hosts[0]), len(set(hosts))
        known = runtime.config().calibrate != "off"
        if count == 1 or not known or self.gpu or self.collective == "barrier":
            return None
        byte = runtime.communicator(op="bench").cost["remote_byte"]
        crossing = bus_factor(self.collective, count)
        crossing *= here if self.collective == "alltoall" else 1
        return bus_factor(self.collective, self.ranks) / crossing / byte / 1e9

    def _algorithms(self) -> dict[str, int]:
        stats = runtime.communicator(op="bench").stats().get(self.collective, {})
        return dict(stats.get("algorithms", {}))


class CopyBenchmark:
    """Times a plain memory copy, to compare it with the time of a collective."""

    def __init__(self, size: int) -> None:
        self.size = size  # the number of bytes of a copy
        # The seconds of one copy on the slowest rank, for each batch.
        self.times: list[float] = []
        self._from, self._to = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def seconds(self, copies: int) -> float:
        """Returns the mean seconds of a copy, from several consecutive copies."""
        start = time.perf_counter()
        for _ in range(copies):
            np.copyto(self._to, self._from)
        return (time.perf_counter() - start) / copies


def spread(times: Sequence[float]) -> float:
    """Returns the distance between the quartiles of `times`, divided by the median."""
    low, middle, high = np.quantile(times, (0.25, 0.5, 0.75))
    return float((high - low) / middle)


def mark(row: dict[str, Any], before: Sequence[dict[str, Any]] = ()) -> str:
    """Returns the symbols of MARKS that apply to a row, given the rows above it."""
    faster = any(row["median"] < _FASTER * other["median"] for other in before)
    return ("*" if row["spread"] > NOISY else "") + ("^" if faster else "")


def digits(value: float | str | None) -> str:
    """Formats a number with three significant digits, and None as "-".

    Example:
        >>> [digits(x) for x in (1065.019, 27.449, 0.24612, None, "ring")]
        ['1070', '27.4', '0.246', '-', 'ring']
    """
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    if value <= 0 or not math.isfinite(value):
        return f"{value:.3g}"
    decimals = 2 - math.floor(math.log10(float(f"{value:.2e}")))
    return f"{round(value, decimals):.{max(0, decimals)}f}"


def line(row: dict[str, Any], marks: str = "") -> str:
    """Formats a row of the table."""
    values = {name: digits(row[name]) for name in FIELDS}
    values["median"] = marks + values["median"]
    if row["size"] == 0:
        values |= {"size": "-", "count": "-"}
    return COLUMNS.format(*values.values()).rstrip()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options. Ends the process with a message if they are wrong."""
    p = argparse.ArgumentParser(prog="ringjax.bench", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("collective", nargs="?", choices=COLLECTIVES, default="allreduce")
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


def _describe_devices() -> str:
    """Describes hosts, ranks and devices, such as `node1: ranks 0-3 on 4 x cpu`."""
    own = (socket.gethostname(), jax.local_devices()[0].device_kind)
    devices = sync.allgather_object(own)
    found = []
    for host in dict.fromkeys(host for host, _ in devices):
        ranks = [rank for rank, device in enumerate(devices) if device[0] == host]
        counts = Counter(kind for name, kind in devices if name == host)
        kinds = " and ".join(f"{n} x {kind}" for kind, n in counts.items())
        which = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
        found.append(f"{host}: rank{'s' * (len(ranks) > 1)} {which} on {kinds}")
    return "; ".join(found)


def ending(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines below the table, as nccl-tests prints them."""
    marks = dict.fromkeys("".join(mark(r, rows[:i]) for i, r in enumerate(rows)))
    lines = [f"# {sign}: {MARKS[sign]}" for sign in marks]
    # All values are right here, because `check` raises an error for a wrong value.
    lines.append("# Out of bounds values : 0 OK")
    rates = [row["busbw"] for row in rows if row["busbw"] is not None]
    if rates:
        lines.append(f"# Avg bus bandwidth    : {digits(statistics.mean(rates))} GB/s")
    return lines


def main(words: Sequence[str] | None = None) -> None:
    """Runs the benchmark on this rank. Rank 0 prints the table."""
    options = parse(words)
    if DTYPES[options.dtype].endswith("64"):
        jax.config.update("jax_enable_x64", True)
    runtime.init()
    prints = runtime.rank() == 0
    bench = Bench(options)
    about: dict[str, Any] = {
        "ringjax": version(),
        "jax": jax.__version__,
        "ranks": runtime.size(),
        "hosts": runtime.cross_size(),
        **{k: getattr(options, k) for k in ("collective", "op", "mode")},
    }
    where = _describe_devices()
    if prints:
        print("#", ", ".join(f"{k} {v}" for k, v in about.items()))
        print("#", where)
        print(COLUMNS.format(*FIELDS), COLUMNS.format(*UNITS), sep="\n", flush=True)
    sizes = size_steps(options.begin, options.end, options.factor)
    rows: list[dict[str, Any]] = []
    for size in sizes[:1] if options.barrier else sizes:  # a barrier has no size
        rows.append(bench.measure(size))
        if prints:
            print(line(rows[-1], mark(rows[-1], rows[:-1])), flush=True)
    if prints:
        print(*ending(rows), sep="\n", flush=True)
        if options.json:
            written = {**about, "where": where, "rows": rows}
            options.json.write_text(json.dumps(written, indent=1) + "\n")
    runtime.shutdown()


if __name__ == "__main__":
    main()
