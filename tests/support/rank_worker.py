"""The pytest plugin inside a rank: runs the tests in step with the other ranks.

Every rank writes a JSON line when a test starts and when it ends. Between two tests the
ranks synchronise through a small shared file and not through ringjax, so a broken
collective in one test cannot disturb the next test. tests/support/rank_items.py reads
the lines.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "RINGJAX_TEST_RANK_DIR"
WITHOUT_HYPOTHESIS = "no:hypothesispytest"  # a value of pytest's option -p
DEFAULT_LIMIT = 60.0
_WAIT = 120.0  # seconds to wait for a slower rank, whose test times out earlier


@dataclass(frozen=True)
class World:
    """Rank and size of this process after `ringjax.init()`."""

    rank: int
    size: int


def results(folder: Path, rank: int) -> Path:
    """Returns the file with the JSON lines of `rank`."""
    return folder / f"results.{rank}"


def stacks(folder: Path, rank: int) -> Path:
    """Returns the file for the stacks of `rank` shortly before a test times out."""
    return folder / f"stacks.{rank}"


def write_selection(folder: Path, tests: Sequence[str]) -> None:
    """Writes the file with the ids of the selected tests, in order, for all ranks."""
    (folder / "selection").write_text(json.dumps(list(tests)))


def command(config: pytest.Config, paths: Sequence[Path]) -> list[str]:
    """Returns the command that runs the selected tests of `paths` in a rank."""
    # With -P, Python imports the installed package, not the checkout in the current
    # folder.
    words = [sys.executable, "-P", "-m", "pytest", "-q", "--no-header"]
    words += ["-p", "no:cacheprovider", "--timeout-method=thread"]
    # Capture only Python's output. If pytest also captured the output of C++, that
    # output would be lost when the process aborts.
    words += ["--capture=tee-sys"]
    words += ["--rootdir", str(config.rootpath), "-c", str(config.inipath)]
    if not any("hypothesis" in path.read_text() for path in paths):
        words += ["-p", WITHOUT_HYPOTHESIS]  # a third of the imports of such a rank
    return [*words, *map(str, paths)]


def limit(item: pytest.Item) -> float:
    """Returns the timeout of a test in seconds."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark and mark.args else DEFAULT_LIMIT


class Progress:
    """The number of tests that each rank has finished, and whether a test failed."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        descriptor = os.open(folder / "progress", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        self._cells = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("I")
        os.close(descriptor)
        self._rank, self._size = rank, size

    def finish(self, failed: bool) -> None:
        """Records that this rank has finished a test."""
        if failed:
            self._cells[self._size + self._rank] = 1
        self._cells[self._rank] += 1

    def all_in_step(self) -> bool:
        """Waits until all ranks finish the test. Returns False if a rank failed."""
        mine = self._cells[self._rank]
        deadline = time.monotonic() + _WAIT
        while time.monotonic() < deadline:
            if any(self._cells[self._size : 2 * self._size]):
                return False
            if all(done >= mine for done in self._cells[: self._size]):
                return True
            time.sleep(0.0005)
        return False


class RankWorker:
    """The pytest plugin of a rank."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._selection = json.loads((folder / "selection").read_text())
        self._results = results(folder, rank).open("a", buffering=1)
        self._stacks = stacks(folder, rank).open("w")
        self._progress = Progress(folder, rank, size)
        self._reports: list[pytest.TestReport] = []
        self._in_order = True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps the selected tests, in the order of the selection."""
        found = {item.nodeid: item for item in items}
        missing = [test for test in self._selection if test not in found]
        if missing:
            raise pytest.UsageError(f"this rank does not know {missing}")
        items[:] = [found[test] for test in self._selection]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Writes the lines of a test around its run, then waits for the other ranks."""
        self._reports.clear()
        self._write(event="start", test=item.nodeid)
        # All ranks write their stacks before pytest-timeout ends the first rank, and
        # with it the job.
        late = max(limit(item) - 6, limit(item) / 2)
        faulthandler.dump_traceback_later(late, file=self._stacks)
        try:
            result = yield
        finally:
            faulthandler.cancel_dump_traceback_later()
        end = _summary(self._reports)
        self._write(event="end", test=item.nodeid, **end)
        self._progress.finish(failed=end["outcome"] == "failed")
        if not self._progress.all_in_step():
            item.session.shouldstop = "a rank failed: the next test needs a new launch"
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        """Turns the garbage collector on after the fixtures of the first test.

        `pytest_collection` of conftest.py turned the collector off.
        """
        result = yield
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collects the reports of setup, call and teardown."""
        self._reports.append(report)

    def pytest_internalerror(self) -> None:
        """Records an internal error of pytest, which is not a failed test."""
        self._in_order = False

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Exits with 0 after failed tests, because the JSON lines report them.

        A rank that crashes or has an internal error still exits with another code.
        """
        expected = (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
        if self._in_order and session.exitstatus in expected and session.items:
            session.exitstatus = pytest.ExitCode.OK

    def _write(self, **event: Any) -> None:
        self._results.write(json.dumps(event) + "\n")


def _summary(reports: Sequence[pytest.TestReport]) -> dict[str, Any]:
    """Combines the reports of setup, call and teardown into one outcome."""
    failed = [r for r in reports if r.failed]
    skipped = [r for r in reports if r.skipped]
    outcome, text, crash, sections = "passed", "", "", []
    if failed:
        outcome, crash = "failed", _crash(failed[0])
        text = "\n".join(f"({r.when}) {r.longreprtext}" for r in failed)
        sections = reports[-1].sections
    elif skipped:
        expected = getattr(skipped[0], "wasxfail", None)
        outcome = "skipped" if expected is None else "xfailed"
        text = _reason(skipped[0]) if expected is None else expected
    seconds = sum(r.duration for r in reports)
    return {
        "outcome": outcome, "text": text, "crash": crash, "sections": sections,
        "seconds": seconds,
    }  # fmt: skip


def _crash(report: pytest.TestReport) -> str:
    """Returns the line of a report that describes the error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else report.longreprtext
    return next(iter(message.splitlines()), "")


def _reason(report: pytest.TestReport) -> str:
    where = report.longrepr  # (path, line, text) for a skip
    text = str(where[2]) if isinstance(where, tuple) else report.longreprtext
    return text.removeprefix("Skipped: ")
