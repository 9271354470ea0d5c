"""python -m fuzz [--runs N] [--seconds S] [--only NAME]: damages inputs of each target.

Run it from the folder tests/. The first input that breaks a rule ends the program with
a traceback that shows the input. Each target gets N runs.
"""

from __future__ import annotations

import argparse
import time

from .damage import search
from .python_targets import targets


def main() -> None:
    """Prints a line for each target: number of inputs, inputs per second."""
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
        runs = search(target, options.runs, options.seed, options.seconds)
        rate = runs / max(time.monotonic() - start, 1e-9)
        print(f"{target.name:12} {runs:10} inputs, {rate:8.0f} a second", flush=True)
        total += runs
    print(f"{total} inputs, nothing broke")


if __name__ == "__main__":
    main()
