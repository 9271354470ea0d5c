"""Runs many simulated jobs from the command line. job.py describes the simulation."""

from __future__ import annotations

import argparse
import sys
import time

from simulation import job
from simulation.call import Violation
from simulation.wrong_rules import WRONG

ALL = {1: 50_000, 2: 5_000, 3: 5_000}  # the number of seeds for each group size


def main(arguments: list[str] | None = None) -> int:
    """Runs many seeds, prints failing seeds, and returns 1 if a seed failed."""
    parser = argparse.ArgumentParser(description=job.__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10000))
    parser.add_argument("--wrong", choices=WRONG, default="")
    parser.add_argument("--group", type=int, default=1, help="workers of a group")
    parser.add_argument("--all", action="store_true", help="60,000 seeds, as make soak")
    options = parser.parse_args(arguments)
    parts = [(options.group, range(*options.seeds))]
    if options.all:
        parts = [(group, range(count)) for group, count in ALL.items()]
    return int(sum(run(*part, options.wrong) for part in parts) > 0)


def run(group: int, seeds: range, wrong: str) -> int:
    """Prints the failing seeds and returns their number."""
    begin, failed = time.process_time(), 0
    for seed in seeds:
        try:
            job.run(seed, wrong, group)
        except Violation as violation:
            failed += 1
            print(violation)
    seconds = time.process_time() - begin
    count = len(seeds)
    print(f"{count} seeds, {failed} failed, {count / seconds:.0f} a second")
    return failed


if __name__ == "__main__":
    sys.exit(main())
