"""Pytest collects every test of the native program. No test of the core is here."""

from __future__ import annotations

import re
import subprocess

import pytest
from support import native_build
from support.launch import ROOT


@pytest.mark.timeout(0)  # the build of the program may take minutes
def test_every_native_test_is_collected_once() -> None:
    listed = subprocess.run(
        [native_build.tests(), "--list"], capture_output=True, text=True, check=True
    )
    read = [
        name
        for file in (ROOT / "tests" / "native").glob("*_test.cc")
        for name in re.findall(r"(?m)^TEST\((\w+)\)", file.read_text())
    ]
    assert sorted(listed.stdout.split()) == sorted(read) == sorted(set(read))


def test_a_name_that_is_only_a_part_of_another_runs_nothing() -> None:
    done = subprocess.run(
        [native_build.tests(), "=A"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "0 passed, 0 failed\n")
