"""Programs of jax.distributed on ringjax have the results of one process.

The process has as many devices as there are processes. support/jax_programs.py has the
programs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.launch import ROOT, Job

PROGRAMS = ROOT / "tests" / "support" / "jax_programs.py"
NAMES = "data_parallel fully_sharded two_axes pipeline experts helpers checkpoint"
Results = dict[str, np.ndarray[Any, Any]]

pytestmark = pytest.mark.timeout(240)


def run(
    size: int, folder: Path, logs: Path, *options: str, **env: str
) -> list[Results]:
    """Runs the programs on `size` ranks; returns what each of them found."""
    words = [sys.executable, "-P", str(PROGRAMS), str(folder)]
    job = Job(size, words, logs, env, options, source=None)
    job.start()
    try:
        code = job.wait(200)
        assert code == 0, job.logs()
    finally:
        left = job.close()
    assert not left, "\n".join(left)
    assert "[ringjax" not in job.logs(), job.logs()
    files = [folder / f"{rank}-of-{size}.npz" for rank in range(size)]
    return [dict(np.load(file)) for file in files]


@pytest.fixture(scope="module", params=[2, 3, 4])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Results, list[Results]]:
    """Returns the results of one process, and of each of several processes."""
    size, folder = request.param, tmp_path_factory.mktemp("results")
    logs = [tmp_path_factory.mktemp("logs") for _ in range(2)]
    found = run(size, folder, logs[0], "--jax-collectives")
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={size}"
    (expected,) = run(1, folder, logs[1], XLA_FLAGS=flags)
    return expected, found


@pytest.mark.parametrize("name", NAMES.split())
def test_results_are_those_of_one_process(
    name: str, results: tuple[Results, list[Results]]
) -> None:
    expected, found = results
    leaves = [leaf for leaf in expected if leaf.startswith(f"['{name}']")]
    assert leaves
    for one in found:
        for leaf in leaves:
            wanted = expected[leaf]
            room = 1e-5 * abs(wanted).max()  # sums have another order
            np.testing.assert_allclose(one[leaf], wanted, 1e-5, room, err_msg=leaf)


def test_ringjax_carries_the_calls(results: tuple[Results, list[Results]]) -> None:
    expected, found = results
    assert not any(name.startswith("calls") for name in expected)
    for one in found:
        calls = {name for name in one if name.startswith("calls")}
        names = ["psum", "all_gather", "psum_scatter", "ppermute", "all_to_all"]
        assert calls >= {f"calls {name}" for name in names}
