"""Tests that the limit (benchmarks/limit/) computes right sums and moves all bytes.

As a program, this file is a rank of the limit. No test measures time.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.launch import ROOT, environment

# Behind everything else: the ringjax under test must not come from the checkout.
sys.path.append(str(ROOT))
from benchmarks.harness import worker
from benchmarks.peers import compiled, limit
from benchmarks.peers.adapter import COLLECTIVES

# Below and above kAtOnce, no multiples of a cache line, and more than two tiles.
COUNTS = [1, 3, 1000, 4096, 4097, 40_001, 400_003]
# Many small tensors across a tile, and one that is larger than a tile.
TENSORS = [*range(1, 200), 150_001, 7, *range(5, 60)]
# Elements per rank: up to a cache line, some tiles, and more than a broadcast's ring.
PARTS = [1, 16, 333, 60_001, 500_000]


def inputs(rank: int, count: int, dtype: Any) -> Any:
    """Draws numbers whose sums are rounded."""
    return np.random.default_rng((rank, count)).random(count, np.float32).astype(dtype)


def check_sums(own: limit.Limit) -> int:
    """Compares all variants, dtypes and shapes with numpy; returns their number."""
    import ml_dtypes

    rank, size, done = own.rank, own.size, 0
    for dtype in (np.float32, ml_dtypes.bfloat16):
        for name in limit.VARIANTS:
            for counts in (*([n] for n in COUNTS), TENSORS):
                arrays = [inputs(rank, n, dtype) for n in counts]
                scale = np.float32(1.0 if len(counts) == 1 else 1 / size)
                step = limit.Allreduce(own._native, own._self, arrays, name, scale)
                step()
                for n, out in zip(counts, step.outputs, strict=True):
                    parts = [inputs(r, n, dtype) for r in range(size)]
                    total = np.sum(np.array(parts, np.float32), axis=0)
                    want = (total * scale).astype(dtype)
                    np.testing.assert_array_equal(out, want, f"{name} {dtype} {n}")
                done += 1
    assert own.total(rank + 1.0) == size * (size + 1) / 2
    for _ in range(300):  # sets of slots take turns across calls of all lengths
        step()
    return done


def check_collectives(own: limit.Limit) -> int:
    """Checks every variant and size in random order; returns the number of cases."""
    cases = [(name, part) for name in own.collectives for part in PARTS]
    mixed = random.Random(own.size)  # all ranks draw the same order
    for variant, part in mixed.sample(cases, len(cases)):
        step = worker.collective(own, variant, part * own.size)  # checks the first
        if part <= PARTS[1]:
            for _ in range(mixed.randrange(9)):
                step()
    return len(cases)


def main(rank: int, size: int, port: int) -> None:
    own = limit.Limit(rank, size, port)
    print(check_sums(own), check_collectives(own), len(own.collectives))
    own.close()


@pytest.mark.timeout(150)  # its ranks spin: on a busy machine they take long
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_variants_have_right_results(size: int) -> None:
    limit.build()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(size), str(40_000 + size)],
            env=environment("limit", {"PYTHONPATH": paths}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)
    sums = 2 * len(limit.VARIANTS) * (len(COUNTS) + 1)
    variants = int(said[0].split()[-1])
    assert said == [f"{sums} {variants * len(PARTS)} {variants}\n"] * size
    assert variants in {len(limit.variants(can_read=can)) for can in (True, False)}


def test_every_collective_has_variants_without_reading() -> None:
    for can_read in (True, False):
        names = [v.partition(": ")[0] for v in limit.variants(can_read)]
        assert set(names) == set(COLLECTIVES)
    assert limit.Limit.collectives == limit.variants(can_read=True)
    assert not any(": read" in v for v in limit.variants(can_read=False))


def test_a_failed_build_raises_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(compiled.CannotBuild, match="no compiler no-such-compiler here"):
        limit.build(tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(compiled.CannotBuild, match=r"limit\.cc -lrt"):
        limit.build(tmp_path)
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
