"""Tests of ringrun's console: whole lines of a rank's output, and its last error."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringjax.run.console import Console

PIECES = st.lists(st.sampled_from([b"", b"\n", b"a", b"bc\n", b"\n\n", b"d" * 70_000]))


def feed(pieces: list[bytes], stream: str = "stdout") -> Console:
    console = Console(2, python=True)
    for piece in filter(None, pieces):
        console.write(1, stream, piece)
    console.write(1, stream, b"")
    return console


@given(PIECES)
def test_every_line_has_one_prefix_regardless_of_chunks(pieces: list[bytes]) -> None:
    stream, before = io.StringIO(), sys.stdout
    sys.stdout = stream
    try:
        feed(pieces)
    finally:
        sys.stdout = before
    text = b"".join(pieces).decode()
    lines = text.removesuffix("\n").split("\n") if text else []
    wanted = "".join(f"[1]<stdout>:{line}\n" for line in lines)
    assert stream.getvalue() == wanted


def test_a_long_line_takes_linear_time(capsys: pytest.CaptureFixture[str]) -> None:
    """A console that searched the whole line for each 64 KiB chunk needed 23 s."""
    feed([b"x" * 50_000] * 400 + [b"\n"])
    assert capsys.readouterr().out == "[1]<stdout>:" + "x" * 20_000_000 + "\n"


def test_unencodable_characters_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bytes_ = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_, encoding="latin-1"))
    feed(["a bar: █ é\n".encode(), b"second\n"])
    assert bytes_.getvalue() == (b"[1]<stdout>:a bar: ? \xe9\n[1]<stdout>:second\n")


ERROR = b"Traceback (most recent call last):\n  File x\nValueError: boom\n"
NOTES = [
    b"[ringjax rank 1] its last calls are in /tmp/ringjax-0-rank1.jsonl\n",
    b"[ringjax 1/2 e0] warning: rank 0 waits; the main thread is at\n"
    b'  File "threading.py", line 1590, in _shutdown\n    lock.acquire()\n',
    b"    @     0x7ff180558ba3  PyObject_Vectorcall\n",
    b"\r 50%|##   | 100/200\r 99%|#### | 199/200",
    b"Epoch 1:  99%|#### | 199/200 [00:01<00:00]\n",
    b"\n\n   \n",
]


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("apart", [False, True])
def test_the_last_error_line_excludes_notes(note: bytes, apart: bool) -> None:
    console = feed([ERROR, note] if apart else [ERROR + note], "stderr")
    assert console.last_error(1) == "ValueError: boom"


def test_the_last_error_line_may_be_indented() -> None:
    assert feed([b"   out of memory\n"], "stderr").last_error(1) == "out of memory"
    assert feed([NOTES[1]], "stderr").last_error(1) == ""
    crash = b"Fatal Python error: Aborted\n\nThread 0x1:\n  File x\n"
    console = feed([b"first\n", crash, b"later\n"], "stderr")
    assert console.last_error(1) == "Fatal Python error: Aborted"
