"""Fixtures and hooks of all tests: the `ranks` mark, job starters, leak checks.

`@pytest.mark.ranks(1, 2, 3)` makes plain `pytest` run a test under ringrun three times,
on 1, 2 and 3 ranks. support/rank_items.py and rank_worker.py implement the mark.
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
from support.rank_items import RUNS, RankItem, Runs, xdist_scope
from support.rank_worker import VARIABLE, RankWorker, World


def _in_rank() -> bool:
    return VARIABLE in os.environ


if rank_worker.WITHOUT_HYPOTHESIS not in sys.argv:
    import hypothesis

    # Every rank must draw equal examples. A deadline for examples would make the ranks
    # draw different numbers of examples.
    hypothesis.settings.register_profile(
        "ranks", derandomize=True, database=None, deadline=None, print_blob=False,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )  # fmt: skip
    hypothesis.settings.load_profile("ranks")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugins for a rank, or for the pytest that launches the ranks."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell script starts background programs with SIGINT ignored. ringrun does
        # not change that, but tests that interrupt a job need the default handler.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _in_rank():
        folder = Path(os.environ[VARIABLE])
        rank, size = (int(os.environ[f"RINGJAX_{x}"]) for x in ("RANK", "SIZE"))
        config.pluginmanager.register(RankWorker(folder, rank, size), "rank-worker")
    else:
        config.stash[RUNS] = Runs()
        config.add_cleanup(warm.end_servers)
        config.pluginmanager.register(skips)
        # The processes of pytest-xdist inherit the cache of the process that started
        # them, so only that process makes it.
        if not hasattr(config, "workerinput"):
            _use_private_cache(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports tests and frameworks while the garbage collector is off.

    Afterwards all imported objects, up to half a million, are frozen. Otherwise each
    garbage collection would visit them, which takes up to 0.3 s, and pytest runs five
    collections at its end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        # In a rank, fixtures still import frameworks, so RankWorker turns the collector
        # on after them.
        if not _in_rank():
            gc.freeze()
            gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Collects garbage once, so that pytest's own collections at the end are short."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Makes a scheduler that runs all tests of a launch in one process of xdist."""
    from xdist.scheduler import LoadScopeScheduling

    class Launches(LoadScopeScheduling):  # type: ignore[misc,unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            return xdist_scope(nodeid, config.rootpath)

        def _assign_work_unit(self, node: Any) -> None:
            """Gives every second process tests from the end of the queue.

            Tests at the front of the queue keep the cores busy. Tests at its end start
            jobs of their own and mostly wait. Mixing them uses the cores evenly.
            """
            if self.nodes.index(node) % 2:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return Launches(config, log)


def _use_private_cache(config: pytest.Config) -> None:
    """Makes tests and their ranks use a temporary cache instead of the user's cache.

    All processes share the compiled programs and use equal compiler flags, because some
    tests compare results bit by bit. jax does not write a cache file atomically, so
    another rank may read half a file. jax then prints a warning and compiles the
    program. That warning is disabled, because some tests compare the output of a rank.
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
    """Corrects the duration of a rank test, and frees the frames of a failed test."""
    report = yield
    if isinstance(item, RankItem) and call.when == "call":
        # The first test of a launch waits for the ranks in its setup.
        report.duration = item.verdict.seconds
    if report.failed and call.excinfo is not None and not item.config.option.usepdb:
        _release(call.excinfo.value)
    return report


def _release(error: BaseException | None) -> None:
    """Clears the frames of a failed test, which may hold sockets, files and processes.

    Python keeps the last traceback, and with it these frames, until another test fails.
    The sockets would then be closed during that test, and the ResourceWarning about
    them would be an error of that test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        while error is not None:
            for frame, _ in traceback.walk_tb(error.__traceback__):
                with contextlib.suppress(RuntimeError):  # pytest's frames still run
                    frame.clear()
                    # Python 3.11 keeps a copy of the variables until this is read.
                    _ = frame.f_locals
            error = error.__context__
        gc.collect()


@pytest.fixture
def world() -> World:
    """Returns rank and size after `ringjax.init`; the test needs the mark `ranks`."""
    if not _in_rank():
        pytest.fail("the fixture `world` needs @pytest.mark.ranks(…)")
    import ringjax

    if not ringjax.is_initialized():
        ringjax.init()
    return World(ringjax.rank(), ringjax.size())


@pytest.fixture
def start_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartJob]:
    """Starts jobs of several ranks. The test fails if a job leaves a process behind."""
    jobs = Jobs(lambda: tmp_path_factory.mktemp("job"))
    yield jobs.start
    left = jobs.close()
    assert not left, "\n".join(left)


@pytest.fixture(autouse=True)
def separate_frameworks() -> Iterator[None]:
    """Fails a test during which a process has loaded both TensorFlow and PyTorch."""
    before = frameworks.both_loaded()
    yield
    assert before or not frameworks.both_loaded(), "see tests/support/frameworks.py"


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves processes, sockets, threads or shared memory behind.

    Only resources of this process, and shared memory with ringjax's name, count. Other
    programs may run beside the tests.
    """
    if _in_rank():
        yield  # a rank keeps its connections; RankItem checks the whole launch
        return
    before = leaks.Snapshot.take()
    yield
    left = leaks.settle(before.leaked_since)
    assert not left, "this test left behind:\n" + "\n".join(left)
