"""The throughput of the output of ranks: python -m benchmarks.output [--ranks 8].

All ranks write as fast as they can, through ringrun and, as the limit, directly into
one pipe. Both take turns. The table has MB per second of all ranks: the median, the
least and the greatest of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

# A program that writes a number of bytes in lines of some width.
_WRITER = """
import os, sys
left, width = map(int, sys.argv[1:])
lines = (b"x" * (width - 1) + b"\\n") * max(1, 65536 // width)
while left > 0:
    left -= os.write(1, lines)
"""
_WIDTHS = (20, 80, 200, 1 << 20)  # bytes of a line, including its end
_ROUNDS = 5


def _seconds(words: list[str], wanted: int) -> float:
    """Returns the seconds until the reader of a command has got all output."""
    began = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE) as command:
        found = subprocess.run(
            ["wc", "-c"], stdin=command.stdout, capture_output=True, check=True
        )
    if command.returncode or int(found.stdout) < wanted:
        raise RuntimeError(
            f"{words[0]} ended with {command.returncode}, {found.stdout!r}"
        )
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--mb", type=int, default=100, help="of all ranks together")
    options = parser.parse_args()
    each = options.mb * 1_000_000 // options.ranks
    print(f"{options.ranks} ranks, {options.mb} MB together, {_ROUNDS} rounds in turns")
    print(f"{'line':>10}  {'ringrun MB/s':>24}  {'one pipe MB/s':>24}  ratio")
    for width in _WIDTHS:
        rank = [sys.executable, "-S", "-c", _WRITER, str(each), str(width)]
        through = [
            sys.executable,
            "-m",
            "ringjax.run",
            "-np",
            str(options.ranks),
            *rank,
        ]
        script = f'for i in $(seq {options.ranks}); do "$@" & done; wait'
        straight = ["sh", "-c", script, "sh", *rank]
        rates: dict[str, list[float]] = {"ringrun": [], "pipe": []}
        for _ in range(_ROUNDS):
            for name, words in (("ringrun", through), ("pipe", straight)):
                rates[name].append(options.mb / _seconds(words, each * options.ranks))
        cells = [
            f"{statistics.median(found):.0f} [{min(found):.0f}, {max(found):.0f}]"
            for found in rates.values()
        ]
        ratio = statistics.median(rates["ringrun"]) / statistics.median(rates["pipe"])
        print(f"{width:>10}  {cells[0]:>24}  {cells[1]:>24}  {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
