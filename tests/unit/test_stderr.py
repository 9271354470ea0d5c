"""Tests that a line that cannot be written to standard error raises no exception."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from ringjax import stderr


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", "2> >(exit)"])
def test_unwritable_stderr_raises_nothing(where: str) -> None:
    # The script sleeps first, so that the reader of the pipe has ended.
    code = "import time; from ringjax.stderr import line; time.sleep(0.1); line('a'); "
    words = [sys.executable, "-c", code + "line('b'); print('on')"]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {where}', "bash", *words],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (0, "on\n"), done


class _Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("stream", [None, _Broken(), io.StringIO()])
def test_a_replaced_stderr_is_used(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    stderr.line("here")
    if type(stream) is io.StringIO:
        assert stream.getvalue() == "here\n"
