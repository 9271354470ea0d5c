"""Fixtures and hooks of all tests: the `ranks` mark, job starters, leak checks.

`@pytest.mark.ranks(1, 2, 3)` runs a test under ringrun on so many ranks, once for each
number, from plain `pytest`. The mechanism is in support/rank_items.py and
rank_worker.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import frameworks, leaks, rank_worker, skips, warm
from support.launch import Jobs, StartJob, cheap_code
from support.rank_items import RUNS, RankItem, Runs, share
from support.rank_worker import VARIABLE, RankWorker, World


def _in_rank() -> bool:
    return VARIABLE in os.environ


if rank_worker.WITHOUT_HYPOTHESIS not in sys.argv:
    import hypothesis

    # Every rank must draw the same examples; a time limit would make them differ.
    hypothesis.settings.register_profile(
        "ranks", derandomize=True, database=None, deadline=None, print_blob=False,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )  # fmt: skip
    hypothesis.settings.load_profile("ranks")


def pytest_configure(config: pytest.Config) -> None:
    """Takes one of the two sides: the pytest that you started, or one inside a rank."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell script starts background programs with SIGINT ignored, and ringrun
        # leaves it so: tests that interrupt a job need the default.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _in_rank():
        folder = Path(os.environ[VARIABLE])
        rank, size = (int(os.environ[f"RINGJAX_{x}"]) for x in ("RANK", "SIZE"))
        config.pluginmanager.register(RankWorker(folder, rank, size), "rank-worker")
    else:
        config.stash[RUNS] = Runs()
        config.add_cleanup(warm.end_servers)
        config.pluginmanager.register(skips)
        if not hasattr(config, "workerinput"):  # pytest-xdist's processes share one
            _give_cache(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Loads tests, and frameworks with them, without looking for garbage.

    What is loaded, up to half a million objects, is frozen: otherwise every collection
    would look through it, which takes up to 0.3 s, and pytest makes five at its end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        if not _in_rank():  # where fixtures load some: RankWorker goes on
            gc.freeze()
            gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Collects what tests have left: pytest, which does it ten times, finds little."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedules tests on pytest-xdist's processes; all tests of a launch go to one."""
    from xdist.scheduler import LoadScopeScheduling

    class Launches(LoadScopeScheduling):  # type: ignore[misc,unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            return share(nodeid, config.rootpath)

        def _assign_work_unit(self, node: Any) -> None:
            """Every second process begins at the end of the queue.

            At its front are the launches of most tests, which keep the cores busy, at
            its end tests that start jobs of their own and mostly wait for them.
            """
            if self.nodes.index(node) % 2:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return Launches(config, log)


def _give_cache(config: pytest.Config) -> None:
    """Gives tests and their ranks a cache of their own, not the user's.

    All processes share the compiled programs and use equal compiler flags, because some
    tests compare results bit by bit. jax does not write a cache file atomically, so
    another rank may read half a file. jax notices that, warns and compiles. Tests that
    compare the output of a rank must not see that warning.
    """
    folder, patch = tempfile.TemporaryDirectory(prefix="ringjax-"), pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", folder.name)
    patch.setenv("JAX_COMPILATION_CACHE_DIR", str(Path(folder.name, "jax")))
    patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    unfinished = "ignore:Error reading persistent compilation cache entry:UserWarning"
    patch.setenv("PYTHONWARNINGS", unfinished)
    # A run that names a platform, such as the make targets for GPUs, must get the code
    # that XLA makes for that platform by default.
    if {"XLA_FLAGS", "JAX_PLATFORMS"}.isdisjoint(os.environ):
        patch.setenv("XLA_FLAGS", cheap_code())
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(patch.undo)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Replaces a marked test by one item for each number of ranks."""
    found = yield
    if _in_rank() or not found:
        return found
    return [
        item
        for node in (found if isinstance(found, list) else [found])
        for item in (
            RankItem.expand(node)
            if isinstance(node, pytest.Function) and node.get_closest_marker("ranks")
            else [node]
        )
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keeps what a failed test has dropped, and a launch's time, where they belong."""
    report = yield
    if isinstance(item, RankItem) and call.when == "call":
        report.duration = item.verdict.seconds  # the launch is the first test's setup
    if report.failed and call.excinfo is not None and not item.config.option.usepdb:
        _release(call.excinfo.value)
    return report


def _release(error: BaseException | None) -> None:
    """Ends what the frames of a failed test still hold: its sockets, files, programs.

    Python keeps the last traceback, and so these frames, until another test fails. What
    they hold would be closed in the middle of that one, and a warning of that kind is
    an error there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        while error is not None:
            for frame, _ in traceback.walk_tb(error.__traceback__):
                with contextlib.suppress(RuntimeError):  # pytest's frames still run
                    frame.clear()
                    _ = frame.f_locals  # Python 3.11 keeps a copy until it is asked
            error = error.__context__
        gc.collect()


@pytest.fixture
def world() -> World:
    """An initialised ringjax; the test must be marked with `ranks`."""
    if not _in_rank():
        pytest.fail("the fixture `world` needs @pytest.mark.ranks(…)")
    import ringjax

    if not ringjax.is_initialized():
        ringjax.init()
    return World(ringjax.rank(), ringjax.size())


@pytest.fixture
def start_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartJob]:
    """Starts jobs of several ranks; the test fails if one leaves anything behind."""
    jobs = Jobs(lambda: tmp_path_factory.mktemp("job"))
    yield jobs.start
    left = jobs.close()
    assert not left, "\n".join(left)


@pytest.fixture(autouse=True)
def frameworks_apart() -> Iterator[None]:
    """Fails a test with which a process comes to hold TensorFlow and PyTorch."""
    before = frameworks.together()
    yield
    assert before or not frameworks.together(), "see tests/support/frameworks.py"


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves processes, sockets, threads or shared memory behind.

    All of it is this process's own, or has the name of ringjax: what other programs do
    beside the tests does not count.
    """
    if _in_rank():
        yield  # a rank keeps its connections; the launch is checked as a whole
        return
    before = leaks.Snapshot.take()
    yield
    left = leaks.settle(before.leaked_since)
    assert not left, "this test left behind:\n" + "\n".join(left)
