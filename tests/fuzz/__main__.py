"""python -m fuzz [--runs N] [--seconds S] [--only NAME]: fuzzes the Python parsers.

Run the program from the folder tests/. Each target reads N damaged inputs. The first
input that breaks a rule ends the program with a traceback that shows the input.
"""

from __future__ import annotations

import argparse
import time

from .damage import fuzz
from .python_targets import targets


def main() -> None:
    """Prints the number of inputs and the inputs per second for each target."""
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    total = 0
    for target in targets():
        if options.only and options.only != target.name:
            continue
        start = time.monotonic()
        runs = fuzz(target, options.runs, options.seed, options.seconds)
        rate = runs / max(time.monotonic() - start, 1e-9)
        print(f"{target.name:12} {runs:10} inputs, {rate:8.0f} a second", flush=True)
        total += runs
    print(f"{total} inputs, nothing broke")


if __name__ == "__main__":
    main()
