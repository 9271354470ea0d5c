"""Tests of the input and output of ranks: lines, progress bars, files, terminals."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch import environment
from support.ringrun import ringrun, sh

from ringjax.run import console as console_module


def test_lines_have_prefixes_and_ranks_have_places() -> None:
    done = ringrun(
        "-np", "3", *sh("echo out $RINGJAX_RANK/$HOROVOD_SIZE; echo err >&2")
    )
    assert done.returncode == 0
    expected = {f"[{rank}]<stdout>:out {rank}/3" for rank in range(3)}
    assert set(done.stdout.splitlines()) == expected
    assert set(done.stderr.splitlines()) == {f"[{r}]<stderr>:err" for r in range(3)}


def test_lines_of_ranks_are_never_mixed() -> None:
    script = "for i in 1 2 3 4 5 6 7 8 9; do printf a; printf 'b\\n'; done; printf end"
    done = ringrun("-np", "3", *sh(script))
    lines = done.stdout.splitlines()
    assert len(lines) == 30
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[{rank}]<stdout>:")]
        assert mine == [f"[{rank}]<stdout>:ab"] * 9 + [f"[{rank}]<stdout>:end"]


def test_a_log_has_the_last_state_of_a_progress_bar() -> None:
    words = ["-np", "1", *sh(r"printf '10%%\r20%%\r\ndone\n'")]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ringjax.run", *words],
        env=environment("ringrun", {}),
        capture_output=True,
        timeout=50,
    )
    p = b"[0]<stdout>:"
    assert done.stdout == p + b"20%\r\n" + p + b"done\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bars_of_several_ranks(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    shown: list[bytes] = []
    console = console_module.Console(2)
    console._terminal, console._colour = {1: terminal, 2: terminal}, False
    monkeypatch.setattr(console, "_write", lambda target, data: shown.append(data))
    for second in range(22):
        monkeypatch.setattr(
            console_module.time, "monotonic", lambda now=second: 100.0 + now
        )
        for rank in range(2):
            console.write(rank, "stdout", b"\r" + f"{second} s".encode())
    for rank in range(2):
        console.write(rank, "stdout", b"\rend\n")
    text = b"".join(shown)
    if terminal:
        assert text.count(b"\r") == 23  # rank 0's
        assert text.count(b"[1] ") == 1 and b"[1] end\n" in text
    else:
        for rank in (b"[0]", b"[1]"):
            mine = [x for x in text.splitlines() if x.startswith(rank)]
            assert [x.partition(b":")[2] for x in mine] == [b"10 s", b"20 s", b"end"]
        assert b"\r" not in text


def test_large_output_is_complete() -> None:
    code = "import sys; sys.stdout.write(('x' * 99 + '\\n') * 40000)"
    done = ringrun("-np", "2", sys.executable, "-c", code)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 80000
    assert {line.partition(":")[2] for line in lines} == {"x" * 99}


def test_output_files(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "here"
    script = "echo out $RINGJAX_RANK; echo err $RINGJAX_RANK >&2"
    done = ringrun("-np", "11", "--output-filename", folder, *sh(script))
    assert done.returncode == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rank.{rank:02d}" for rank in range(11)
    ]
    for rank in range(11):
        for stream, word in (("stdout", "out"), ("stderr", "err")):
            text = (folder / f"rank.{rank:02d}" / stream).read_text()
            assert text == f"{word} {rank}\n"
    assert "[10]<stdout>:out 10\n" in done.stdout


def test_an_empty_name_makes_no_output_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ringrun("-np", "2", "--output-filename", "", *sh("echo out"))
    assert done.returncode == 0
    assert not list(tmp_path.iterdir())


def test_timestamps() -> None:
    words = ["-np", "1", "--prefix-output-with-timestamp", *sh("echo hello")]
    stamp, _, rest = ringrun(*words).stdout.partition("[0]<stdout>:")
    time.strptime(stamp)
    assert rest == "hello\n"


def test_rank_0_reads_standard_input_of_ringrun() -> None:
    script = sh("read line && echo got $line; cat")
    done = ringrun("-np", "2", "--stdin", "0", *script, given="typed\nmore\n")
    assert done.stdout == "[0]<stdout>:got typed\n[0]<stdout>:more\n", done


def test_a_breakpoint_on_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "stops.py"
    script.write_text("answer = 6\nbreakpoint()\nprint('it is', answer)\n")
    parent, child = os.openpty()
    words = ("-np", "2", "--stdin", "0", "sh", "-c")
    only_0 = f"[ $RINGJAX_RANK = 1 ] || exec {sys.executable} {script}"
    job = subprocess.Popen(
        [sys.executable, "-P", "-m", "ringjax.run", *words, only_0],
        env=environment("ringrun", {}),
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
    )
    os.close(child)
    seen = b""
    while b"(Pdb)" not in seen:
        seen += os.read(parent, 4096)
    os.write(parent, b"answer = 42\nc\n")
    assert job.wait(20) == 0
    while b"it is 42" not in seen:
        seen += os.read(parent, 4096)
    os.close(parent)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("-H", "elsewhere.invalid:1"), "--stdin 0: rank 0 is on another host"),
        (("--min-np", "1"), "--stdin 0: not in an elastic job"),
    ],
)
def test_stdin_option_is_refused_for_other_hosts_and_elastic_jobs(
    words: tuple[str, ...], text: str
) -> None:
    done = ringrun("-np", "1", *words, "--stdin", "0", "true")
    assert done.returncode == 2 and text in done.stderr


def test_stdin_is_empty() -> None:
    assert ringrun("-np", "2", "cat").returncode == 0
