"""Runs many simulated jobs from the command line, see job.py."""

from __future__ import annotations

import argparse
import sys
import time

from simulation import job
from simulation.call import Violation
from simulation.wrong_rules import WRONG


def main(arguments: list[str] | None = None) -> int:
    """Runs many seeds, prints those that fail; 1 if there were any."""
    parser = argparse.ArgumentParser(description=job.__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10000))
    parser.add_argument("--wrong", choices=WRONG, default="")
    parser.add_argument("--group", type=int, default=1, help="workers of a group")
    options = parser.parse_args(arguments)
    begin, failed = time.process_time(), 0
    for seed in range(*options.seeds):
        try:
            job.run(seed, options.wrong, options.group)
        except Violation as violation:
            failed += 1
            print(violation)
    seconds = time.process_time() - begin
    count = options.seeds[1] - options.seeds[0]
    print(f"{count} seeds, {failed} failed, {count / seconds:.0f} a second")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
