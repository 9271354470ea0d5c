"""Tests on a real GPU, which are skipped without one.

`make gpu-check` runs them, and their results become tables of its report. Several ranks
share one device (tests/support/gpu_ranks.py). With RINGJAX_TEST_DEVICE=cpu the tests of
several ranks run on the CPU. The tests of the CUDA and NCCL stubs are elsewhere.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import gpu_ranks, rank_worker

from benchmarks.gpu import driver
from benchmarks.gpu.section import RESULT, Report

HERE = Path(__file__).parent
IN_RANK = rank_worker.VARIABLE in os.environ
ONE_RANK = {"test_communicator.py", "test_jax.py", "test_kernels.py"}  # need a GPU
NO_DEVICE = "no CUDA device"
WITHOUT_JAX = {"test_communicator.py", "test_kernels.py", "test_torch.py"}


@functools.cache
def reason_against_jax() -> str:
    """Returns why JAX cannot compute on a GPU here; empty if it can."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import jax; jax.devices('cuda')"],
        env={"JAX_PLATFORMS": "cuda", **os.environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return "" if done.returncode == 0 else f"{NO_DEVICE} for JAX: {lines[-1]}"


def reason_to_skip(file: str) -> str:
    """Returns why the tests of a file cannot run on this machine; empty if they can."""
    if gpu_ranks.ON_CPU and file not in ONE_RANK:
        return ""
    count, why = driver.count_devices()
    if not count:
        return f"{NO_DEVICE}: {why}"
    # Starting JAX takes seconds. The process that started the ranks has checked it, and
    # in `make gpu-check` a test must fail and not be skipped if JAX does not start.
    known = IN_RANK or RESULT in os.environ or file in WITHOUT_JAX
    return "" if known else reason_against_jax()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests of this folder that cannot run here; schedules always can."""
    for item in items:
        if item.path.parent != HERE:
            continue
        # Warnings of JAX's CUDA plugin must not fail the tests.
        item.add_marker(pytest.mark.filterwarnings("default"))
        if item.path.name.startswith("test_") and (
            why := reason_to_skip(item.path.name)
        ):
            item.add_marker(pytest.mark.skip(reason=why))


class ReportedTests:
    """A pytest plugin that writes the outcomes of tests into a section's report.

    A row has all parameters of a test function. Each value that a test has recorded by
    `record_property` becomes a note. A missing device is a failure of the section.
    """

    def __init__(self, report: Report) -> None:
        self._report, self._rows = report, dict[str, list[str]]()
        self._totals: dict[str, tuple[int, float]] = {}
        report.table("Tests on a device", "test", "result", "s")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test when it has run, was skipped, or has failed in any phase."""
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.rpartition("/")[2].partition("[")[0]
        passed, seconds = self._totals.get(name, (0, 0.0))
        passed, seconds = passed + report.passed, seconds + report.duration
        self._totals[name] = passed, seconds
        if name not in self._rows:
            self._rows[name] = self._report.row(name, "", "")
        row, text = self._rows[name], f"{passed} ok"
        if report.skipped and isinstance(report.longrepr, tuple):
            text = f"not run: {report.longrepr[2].removeprefix('Skipped: ')}"
        if report.failed or NO_DEVICE in text:
            text = "FAILED"
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else str(report.longrepr)
            self._report.fail(f"{report.nodeid}: {' '.join(reason.split())[:500]}")
        row[1:] = [row[1] if row[1] == "FAILED" else text, f"{seconds:.2f}"]
        for what, value in report.user_properties:
            self._report.note(f"{what}: {value}")
        self._report.write()


def pytest_configure(config: pytest.Config) -> None:
    """Registers `ReportedTests` in a section of `make gpu-check`."""
    if path := os.environ.get(RESULT):
        config.pluginmanager.register(ReportedTests(Report(Path(path))))


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Turns the check for leaks off: CUDA and JAX keep threads and descriptors."""


@pytest.fixture(autouse=True)
def separate_host() -> None:
    """Makes a rank a host of its own before another fixture calls `ringjax.init`."""
    if IN_RANK:
        gpu_ranks.separate_host_of_job()


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    """The first device, opened by the driver's API only."""
    found = driver.Device()
    yield found
    found.release_all()
