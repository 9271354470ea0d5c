"""What encrypted links cost: `python -m benchmarks.hosts.encrypted` (Python 3.13).

Two ranks of this machine talk TCP over loopback, plain and with RINGJAX_TLS=required in
turn, each in a job of its own; both share its cores with the kernel.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

SIZES = (4 << 10, 1 << 20, 16 << 20)  # bytes

RANK = """
import sys, time
import numpy as np
import ringjax
ringjax.init()
for size in map(int, sys.argv[1:]):
    x = np.ones(size // 4, np.float32)
    calls = max(5, min(100, (64 << 20) // size))
    times = []
    for _ in range(calls + 2):
        began = time.perf_counter()
        ringjax.allreduce(x, op=ringjax.Sum)
        times.append(time.perf_counter() - began)
    if ringjax.rank() == 0:
        print("median", size, sorted(times[2:])[calls // 2], flush=True)
ringjax.shutdown()
"""


def measure(tls: str) -> dict[int, float]:
    """Seconds of an allreduce by size, the median of one job."""
    words = [
        sys.executable,
        "-P",
        "-m",
        "ringjax.run",
        "-np",
        "2",
        sys.executable,
        "-c",
    ]
    done = subprocess.run(
        [*words, RANK, *map(str, SIZES)],
        env=os.environ | {"RINGJAX_SHM": "0", "RINGJAX_TLS": tls},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    lines = [line.partition("median ")[2] for line in done.stdout.splitlines()]
    return {int(size): float(s) for size, s in (line.split() for line in lines if line)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    found = [(measure("off"), measure("required")) for _ in range(rounds)]
    print("bytes, plain ms, encrypted ms, ratio (least to most)")
    for size in SIZES:
        plain = statistics.median(p[size] for p, _ in found)
        sealed = statistics.median(e[size] for _, e in found)
        ratios = sorted(e[size] / p[size] for p, e in found)
        print(
            f"{size}, {plain * 1e3:.2f}, {sealed * 1e3:.2f}, "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
