"""The console of ringrun: whole lines of a rank's output, and its last error line."""

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
def test_every_line_has_a_prefix_however_it_is_cut(pieces: list[bytes]) -> None:
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


def test_a_line_of_twenty_megabytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Searching the whole unfinished line with every piece took 23 s for 64 KiB."""
    feed([b"x" * 50_000] * 400 + [b"\n"])
    assert capsys.readouterr().out == "[1]<stdout>:" + "x" * 20_000_000 + "\n"


def test_a_character_that_the_stream_cannot_show(
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
def test_last_words_are_the_error_and_no_note(note: bytes, apart: bool) -> None:
    console = feed([ERROR, note] if apart else [ERROR + note], "stderr")
    assert console.last_error(1) == "ValueError: boom"


def test_last_words_of_a_program_that_indents() -> None:
    assert feed([b"   out of memory\n"], "stderr").last_error(1) == "out of memory"
    assert feed([NOTES[1]], "stderr").last_error(1) == ""
    crash = b"Fatal Python error: Aborted\n\nThread 0x1:\n  File x\n"
    console = feed([b"first\n", crash, b"later\n"], "stderr")
    assert console.last_error(1) == "Fatal Python error: Aborted"
