"""Tests of commands whose standard output is closed: no error, unchanged exit code."""

from __future__ import annotations

import sys

import pytest
from support.doctor import DOCTOR
from support.unread_pipe import run_without_reader

MODULE = [sys.executable, "-P", "-m"]
IN_PARTS = """
from ringjax import stdout
with stdout.until_closed():
    print("x" * 100_000)
    print("and so on")
    raise SystemExit("went on")
print("after it")
raise SystemExit(3)
"""
AT_THE_END = """
from ringjax import stdout
with stdout.until_closed():
    print("stays in the buffer until now")
raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        pytest.param([sys.executable, "-c", IN_PARTS], 3, id="in-parts"),
        pytest.param([sys.executable, "-c", AT_THE_END], 3, id="at-the-end"),
        pytest.param([*DOCTOR, "--no-trial"], 0, id="doctor"),
        pytest.param([*MODULE, "ringjax.run", "--check-build"], 0, id="check-build"),
        pytest.param([*MODULE, "ringjax.config"], 0, id="config"),
    ],
)
def test_a_closed_stdout_ends_quietly(words: list[str], code: int) -> None:
    assert run_without_reader(words) == (code, "")
