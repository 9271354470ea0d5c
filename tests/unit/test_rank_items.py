"""Tests of the harness of rank tests: failures, crashes, hangs and leaks are reported.

The tests run pytest on small files of marked tests that make no collectives.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from support.launch import ROOT, environment

pytestmark = pytest.mark.timeout(120)

Inner = Callable[..., str]
COLD = {"RINGJAX_TEST_COLD": "1"}  # for a single launch, a warm server is slower


@pytest.fixture
def inner(tmp_path: Path) -> Inner:
    """Returns a function that runs pytest on one test file and returns its output."""

    def run(source: str, *options: str) -> str:
        file = tmp_path / "test_inner.py"
        head = "import os, pytest, subprocess, sys, time\n"
        head += "RANK = os.environ.get('RINGJAX_RANK')\n"
        file.write_text(head + textwrap.dedent(source))
        env = environment("harness", {"PYTEST_PLUGINS": "conftest", **COLD})
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT / "tests"), env.get("PYTHONPATH")])
        )
        words = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider"]
        words += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
        done = subprocess.run(
            [*words, *options, str(file)],
            env=env,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
        )
        print(done.stdout)  # shown when the test fails
        return done.stdout

    return run


def test_a_failure_on_one_rank_does_not_affect_the_next_test(inner: Inner) -> None:
    out = inner("""
        pytestmark = pytest.mark.ranks(1, 3)

        @pytest.mark.parametrize("limit", [2, 3])
        def test_rank_is_small(limit):
            print("speaking:", RANK)
            assert int(RANK) < limit

        def test_next(): pass
    """)
    assert "1 failed, 5 passed" in out
    assert "test_rank_is_small[2-3 ranks] - rank 2 of 3: " in out
    assert "speaking: 2" in out
    assert "speaking: 1" not in out


def test_one_launch_runs_the_selected_tests_of_a_file(inner: Inner) -> None:
    out = inner(
        """
        pytestmark = pytest.mark.ranks(2)
        seen = []
        def test_one(): seen.append("one")
        def test_two(): assert seen == ["one"]  # in the same processes
        def test_three(): assert False
        @pytest.mark.ranks(1, isolated=True, env={"COLOUR": "red"})
        def test_four(): assert os.environ["COLOUR"] == "red"
        """,
        "-v",
        "-k",
        "not three",
    )
    assert "test_one[2 ranks] PASSED" in out
    assert "test_four[1 rank] PASSED" in out
    assert "3 passed, 1 deselected" in out


def test_skips_and_expected_failures_keep_their_reasons(inner: Inner) -> None:
    out = inner("""
        pytestmark = pytest.mark.ranks(2)
        def test_skip(): pytest.skip("no device here")
        def test_skip_on_one_rank():
            if RANK == "1":
                pytest.skip("only here")
        @pytest.mark.xfail(reason="known weakness", strict=True)
        def test_weak(): assert False
        @pytest.mark.xfail(reason="repaired meanwhile", strict=True)
        def test_repaired(): pass
    """)
    assert "2 failed, 1 skipped, 1 xfailed" in out
    assert "no device here" in out
    assert "test_skip_on_one_rank[2 ranks] - the ranks disagree" in out
    assert "XPASS(strict)" in out


def test_a_rank_that_dies_fails_the_test_with_its_log(inner: Inner) -> None:
    out = inner("""
        pytestmark = pytest.mark.ranks(2)
        def test_dies():
            if RANK == "1":
                os.write(2, b"last words")
                os._exit(7)
        def test_next(): pass
    """)
    assert "1 failed, 1 passed" in out
    assert "rank 1 of 2 has no result" in out
    assert "exit code 7" in out
    assert "last words" in out


def test_a_crash_shows_its_stack(inner: Inner) -> None:
    out = inner("""
        import faulthandler
        @pytest.mark.ranks(1)
        def test_dies():
            def deep(more):
                deep(more - 1) if more else faulthandler._sigsegv()
            deep(90)
    """)
    assert "1 failed" in out
    assert "Fatal Python error: Segmentation fault" in out
    assert "in deep" in out


@pytest.mark.parametrize("when", ["collected", "imported"])
def test_a_rank_that_ends_before_its_first_test_shows_its_output(
    inner: Inner, when: str
) -> None:
    """XLA aborts a process like this when it finds an unknown flag."""
    dies = "if RANK: os.write(2, b'Unknown flag: --t'); print('so I end'); os._exit(1)"
    source = f"""
        {dies if when == "imported" else ""}
        @pytest.mark.ranks(2)
        def test_one(begin): pass
        @pytest.fixture
        def begin():
            {dies}
    """
    out = inner(source)
    assert "1 failed" in out
    assert "Unknown flag: --t" in out and "so I end" in out


def test_a_rank_that_hangs_is_ended_and_every_rank_shows_its_stack(
    inner: Inner,
) -> None:
    out = inner("""
        @pytest.mark.ranks(2)
        @pytest.mark.timeout(4)
        def test_hangs():
            def wait_for_ever():
                time.sleep(1000)
            def wait_for_the_other():
                time.sleep(999)
            wait_for_ever() if RANK == "1" else wait_for_the_other()
    """)
    assert "1 failed" in out
    stacks = out[out.index("--- stacks of rank 0") :]
    assert "in wait_for_the_other" in stacks[: stacks.index("--- stacks of rank 1")]
    assert "in wait_for_ever" in stacks


def test_a_leak_of_a_launch_is_a_failure(inner: Inner) -> None:
    left = Path(f"/dev/shm/ringjax-test-{os.getpid()}")
    try:
        out = inner(f"""
            @pytest.mark.ranks(1)
            def test_leaves_shared_memory():
                open("{left}", "w").close()
        """)
    finally:
        left.unlink(missing_ok=True)
    assert "1 failed" in out
    assert f"the launch left behind:\n{left}" in out


def test_a_leak_in_this_process_is_a_failure(inner: Inner) -> None:
    out = inner("""
        import socket
        kept = []
        def test_listens(): kept.append(socket.create_server(("127.0.0.1", 0)))
        def test_clean(): pass
    """)
    assert "1 error" in out
    assert "tcp listening on port" in out


def test_unclosed_sockets_of_a_failed_test_fail_no_other_test(inner: Inner) -> None:
    out = inner("""
        import gc, socket

        def use(sock): raise ValueError(sock.getsockname())
        def test_drops(): use(socket.create_server(("127.0.0.1", 0)))
        def test_collects(): gc.collect()
        def test_drops_behind_an_error():
            try:
                use(socket.create_server(("127.0.0.1", 0)))
            except ValueError:
                assert 1 == 2
        def test_collects_again(): gc.collect()
    """)
    assert "2 failed, 2 passed" in out


def test_shared_memory_of_other_programs_is_not_a_leak(inner: Inner) -> None:
    other = Path(f"/dev/shm/sem.of-another-program-{os.getpid()}")
    try:
        out = inner(f"""
            def test_beside_others(): open("{other}", "w").close()
        """)
    finally:
        other.unlink(missing_ok=True)
    assert "1 passed" in out


def test_a_warning_is_an_error(inner: Inner) -> None:
    out = inner("""
        import warnings
        @pytest.mark.ranks(1)
        def test_warns(): warnings.warn("old ways")
    """)
    assert "UserWarning: old ways" in out
    assert "1 failed" in out
