"""Tests of support/again.py, which reruns failed tests, and of support/skips.py.

A failed test that passes when it is rerun alone is reported as flaky. A run ends with a
list of the skipped tests by reason.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.launch import ROOT, environment

TESTS = """
import pathlib
import pytest

def test_passes():
    pass

@pytest.mark.parametrize("value", ["[a b]", "c::d"])
def test_fails_the_first_time(value, request, tmp_path_factory):
    again = pathlib.Path(__file__).with_name(f"seen {value[1]}")
    if not again.exists():
        again.touch()
        pytest.fail("by chance")

def test_is_skipped():
    pytest.skip("no device here")

@pytest.fixture
def broken():
    raise RuntimeError("out of order")
"""
BROKEN = "\ndef test_needs_what_is_broken(broken):\n    pass\n"


def run(folder: Path, source: str, *program: str) -> tuple[int, list[str]]:
    """Runs `program` on a test file. Returns the exit code and the output lines."""
    (folder / "test_it.py").write_text(source)
    done = subprocess.run(
        [sys.executable, *program, "-c", "/dev/null", "--rootdir", "."],
        cwd=folder,
        env=environment("again", {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
    )
    print(done.stdout)  # shown when the test fails
    return done.returncode, done.stdout.splitlines()


AGAIN = str(ROOT / "tests" / "support" / "again.py")


def test_a_flaky_test_does_not_fail_the_run(tmp_path: Path) -> None:
    code, lines = run(tmp_path, TESTS, AGAIN)
    assert code == 0
    flaky = [line for line in lines if line.startswith("FLAKY")]
    assert flaky == [
        "FLAKY test_it.py::test_fails_the_first_time[[a b]]",
        "FLAKY test_it.py::test_fails_the_first_time[c::d]",
    ]
    assert " 2 flaky, 1 passed, 1 skipped in " in lines[-1]
    assert lines[-1].startswith("====")


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    code, lines = run(tmp_path, TESTS + BROKEN, AGAIN, "-k", "not c::d")
    assert code == 1
    assert "FAILED TWICE test_it.py::test_needs_what_is_broken" in lines
    assert "FLAKY test_it.py::test_fails_the_first_time[[a b]]" in lines
    assert " 1 failed, 1 flaky, 1 passed, 1 skipped, " in lines[-1]


def test_many_failures_are_not_retried(tmp_path: Path) -> None:
    source = "import pytest\n@pytest.mark.parametrize('n', range(11))\n"
    code, lines = run(tmp_path, source + "def test_it(n): assert not n + 1\n", AGAIN)
    assert code == 1
    assert not [line for line in lines if line.startswith("again")]
    assert " 11 failed in " in lines[-1]


def test_skips_are_listed_by_reason(tmp_path: Path) -> None:
    source = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_some(n):
    pytest.skip("no  device\\nhere")

@pytest.mark.skipif(True, reason="no root")
def test_another():
    pass

@pytest.mark.xfail
def test_expected():
    assert False
"""
    plugin = ("-P", "-m", "pytest", "-p", "support.skips")
    code, lines = run(tmp_path, source, *plugin)
    assert code == 0
    head = next(i for i, line in enumerate(lines) if "4 skipped, by reason" in line)
    assert lines[head + 1 : head + 3] == [
        "   3 no device here (test_it.py::test_some[0])",
        "   1 no root (test_it.py::test_another)",
    ]


def test_the_tests_that_ci_chooses_exist() -> None:
    choice = "source <(sed -n '/^CHOSEN=(/,/^)/p' .ci/run); printf '%s\n' ${CHOSEN[@]}"
    names = subprocess.check_output(["bash", "-c", choice], cwd=ROOT, text=True)
    assert len(names.split()) > 10
    for name in names.split():
        file, _, test = name.partition("::")
        assert (f"def {test}" if test else "") in (ROOT / file).read_text(), name
