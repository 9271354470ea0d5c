"""Compares jobs with faults with one process: `python -m chaos.same_bits`, in tests/.

`ringjax.pieces.step` must give one SHA-256 of parameters, optimizer state, statistics
and exponents. The program compares these jobs with one process without ringrun:

* a sweep of jobs without faults: every number of ranks, transport, model and kind of
  shares;
* one elastic job with faults for each seed, which decides all of these. Each step of
  each worker is compared.

`make soak` runs it. A row that is wrong shows how to repeat it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from support.launch import Jobs

from chaos.cells import MODELS, RANKS, TRANSPORTS, References, draw, run_cell, run_sweep
from ringjax.control.tls import supported


class Table:
    """Runs the cells, and prints a row for each.

    Args:
        folder: an empty folder for traces and logs.
        transports: the transports to test.
    """

    def __init__(self, folder: Path, transports: Sequence[str]) -> None:
        self._folder, self._transports = folder, transports
        self.references, self.wrong = References(), 0

    def sweep(self, sizes: Sequence[int]) -> None:
        """Runs the jobs without faults on these numbers of ranks."""
        for transport, ranks in itertools.product(self._transports, sizes):

            def run(jobs: Jobs, transport: str = transport, ranks: int = ranks) -> str:
                found = (MODELS, self.references, jobs.start)
                return run_sweep(ranks, transport, *found)

            self._row(
                f"sweep     {ranks} ranks  {transport:6}",
                run,
                f"--seeds 0 --sweep {ranks} --transports {transport}",
            )

    def seed(self, seed: int) -> None:
        """Runs the elastic job of a seed."""
        cell = draw(seed, self._transports)

        def run(jobs: Jobs) -> str:
            reference = self.references[cell.model]
            return run_cell(cell, reference, jobs.start, self._new_folder())

        transports = " ".join(self._transports)
        self._row(
            f"seed {seed:3}  {cell.ranks} ranks  {cell.transport:6}  {cell.model:10}  "
            f"{cell.shares:8}  {cell.spares} spare",
            run,
            f"--sweep --first {seed} --seeds 1 --transports {transports}; {cell}",
        )

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder))

    def _row(self, name: str, run: Callable[[Jobs], str], again: str) -> None:
        began, jobs = time.monotonic(), Jobs(self._new_folder)
        try:
            with ExitStack() as stack:
                stack.callback(jobs.close)
                text = run(jobs)
                leaked = jobs.close()
                assert not leaked, leaked
        except AssertionError as error:
            self.wrong += 1
            text = f"WRONG: {error}\nto repeat it: python -m chaos.same_bits {again}"
        print(f"{name}  {time.monotonic() - began:5.1f} s  {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the sweep and the seeds; exits with an error if any row is wrong."""
    options = parse(arguments)
    if not supported():
        print("TLS is not tested: the ssl of Python before 3.13 has no PSK")
    with tempfile.TemporaryDirectory(prefix="ringjax-same-bits-") as name:
        # All jobs share their compiled programs, which saves most of the time.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = options.cache or f"{name}/cache"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        table = Table(Path(name), options.transports)
        with closing(table.references):
            table.sweep(options.sweep)
            for seed in range(options.first, options.first + options.seeds):
                table.seed(seed)
    if table.wrong:
        raise SystemExit(f"{table.wrong} rows are wrong")
    print("every row has the digests of one process")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    usable = [name for name in TRANSPORTS if name != "tls" or supported()]
    parser = argparse.ArgumentParser(prog="python -m chaos.same_bits")
    parser.add_argument("--seeds", type=int, default=50, help="the number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--sweep", type=int, nargs="*", default=RANKS, help="numbers of ranks"
    )
    parser.add_argument("--transports", nargs="+", choices=usable, default=usable)
    parser.add_argument("--cache", default="", help="a folder for compiled programs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
