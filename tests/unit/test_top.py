"""Tests of `ringjax top`: the view, its width, finding jobs, and malformed messages."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from support.launch import ROOT, environment
from support.waiting import LONG

from ringjax.control.polling import wait_readable
from ringjax.monitor import sockets
from ringjax.monitor.job_time import LOST, PROGRESS
from ringjax.monitor.view import RankView, View
from ringjax.top import cli, screen, table
from ringjax.top.job_connection import JobConnection, JobEnded, JobStatus, parse_status

RECORDED = (ROOT / "docs/pictures/top.json").read_bytes()


SHARES = {PROGRESS: 0.1, **dict.fromkeys(LOST, 0.9 / len(LOST))}


def _large(ranks: int = 500) -> JobStatus:
    rows = [
        RankView(
            *(rank, rank),
            host=f"a-host-with-a-long-name-{rank}",
            waits=1.0,
            moves=1.0,
            last_in=1.0 if rank == 400 else 0.0,
            late_by=123.456,
            busbw=123.4e9,
            memory=(1 << 40) - 1,
            place="a_long_name_of_a_file.py:12345 in a_long_name_of_a_function",
            silent=9999.0 if rank == 450 else 0.1,
        )
        for rank in range(ranks)
    ]
    view = View(5.0, 123, ranks, ranks, 12345.6, 0.0123, 1e9, 400, rows)
    events = [(1e6, "a rank was lost " * 20), (0.0, "x")]
    spares = [(number, f"a-host-{number}", number % 2 == 0) for number in range(9)]
    return JobStatus(
        *(view, 1 << 22, "python " + "long " * 50, True, 1e6, 999, 999, events),
        *(spares, SHARES),
    )


@pytest.fixture(params=["recorded", "large", "empty"])
def seen(request: pytest.FixtureRequest) -> JobStatus:
    if request.param == "recorded":
        return parse_status(RECORDED)
    return _large() if request.param == "large" else JobStatus(View(0.0))


def test_text_has_at_most_80_columns(seen: JobStatus) -> None:
    lines = list(table.lines(seen))
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (132, 50), (80, 14)])
def test_the_screen_fits(seen: JobStatus, width: int, height: int) -> None:
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(screen.picture(seen, width, height))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert f"ringjax top   {seen.command}"[:40] in lines[0]


def test_slow_and_silent_ranks_are_shown_first() -> None:
    rows = [row.rank for row in table.chosen(_large(), 5)]
    assert rows[-2:] == [400, 450] and len(rows) == 5
    text = "\n".join(table.lines(_large(), most=5))
    assert "... and 495 more" in text and "no news for 2:46:39" in text
    assert "all wait for rank 400: last in 100% of the calls, 123 s late" in text
    assert "goodput 10.0 % of 277 h 46 min: start 10.0 %, compile 10.0 %" in text


def test_spares_are_named() -> None:
    status = JobStatus(View(0.0), spares=[(3, "n1", True), (8, "n2", False)])
    text = "\n".join(table.lines(status))
    assert "spares: worker 3 on n1 sleeps, worker 8 on n2 starts" in text
    assert "spare" not in "\n".join(table.lines(parse_status(RECORDED)))


def test_text_of_the_recorded_status() -> None:
    text = "\n".join(table.lines(parse_status(RECORDED)))
    assert "4 ranks on 2 hosts" in text and "1 joined, 1 lost" in text
    assert "node-b" in text and " <-" in text and "steps/s" in text
    assert "was killed by signal 9" in text


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"3", b"{}", b'{"view": 3}', b'{"view": {}}'),
        b'{"view": {"seconds": 1, "rows": 5}}',
        b'{"view": {"seconds": 1, "rows": [{}]}}',
        b'{"view": {"seconds": 1}, "job": []}',
        b'{"view": {"seconds": 1}, "events": [1]}',
        b'{"view": {"seconds": 1}, "time": {"start": NaN}}',
        b'{"view": {"seconds": 1}, "time": [1]}',
        b"[" * 100_000,
    ],
)
def test_malformed_messages_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_status(text)


def test_unknown_fields_are_ignored() -> None:
    message = json.loads(RECORDED)
    message["view"]["new"] = message["view"]["rows"][0]["new"] = message["new"] = 1
    assert parse_status(json.dumps(message).encode()) == parse_status(RECORDED)


# Finding the job.


@pytest.fixture
def socket_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    deep = tmp_path / ("deep" * 30)  # longer than the address of a socket may be
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    yield sockets.socket_folder()


def test_only_the_user_can_access_the_socket(socket_folder: Path) -> None:
    with sockets.listen()[0] as sock:
        assert stat.S_IMODE(socket_folder.stat().st_mode) == 0o700
        (path,) = socket_folder.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert cli.find(None) == path == cli.find(str(os.getpid()))
        with sockets.connect(path):
            pass
        with sockets.listen()[0] as other:  # a second job of this process
            assert other is not sock
            assert len(list(socket_folder.iterdir())) == 2


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_folder_that_others_can_enter_is_not_used(
    socket_folder: Path, mode: int
) -> None:
    socket_folder.mkdir()
    socket_folder.chmod(mode)
    with pytest.raises(PermissionError):
        sockets.listen()
    assert sockets.find_jobs() == {}


def test_a_symbolic_link_to_a_folder_is_not_used(
    socket_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    socket_folder.symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError):
        sockets.listen()


def test_sockets_of_killed_ringruns_are_removed(socket_folder: Path) -> None:
    socket_folder.mkdir(mode=0o700)
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name in (f"{ended.pid}-0.sock", "notes.txt"):
        (socket_folder / name).touch()
    assert sockets.find_jobs() == {}
    assert [path.name for path in socket_folder.iterdir()] == ["notes.txt"]


def test_the_job_is_found_by_process_id(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {None: "no running job", "1": "no ringrun 1", "x": "'x' is no process id"}
    for wanted, why in missing.items():
        with pytest.raises(sockets.JobSocketError, match=why):
            cli.find(wanted)
    with sockets.listen()[0]:
        (path,) = socket_folder.iterdir()
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as other:
            monkeypatch.chdir(socket_folder)
            other.bind("1-0.sock")
            other.listen()
            with pytest.raises(sockets.JobSocketError, match="several jobs run: 1, "):
                cli.find(None)
            assert cli.find(str(os.getpid())) == path


class Ringrun:
    """A fake ringrun that sends the same bytes to each client.

    Args:
        hangs: whether connections stay open afterwards.
    """

    def __init__(self, data: bytes, hangs: bool = False) -> None:
        self._data, self._hangs = data, hangs
        self._listener, self.path = sockets.listen()
        self._listener.settimeout(0.05)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Ringrun:
        self._thread.start()
        return self

    def end_job(self) -> None:
        """Ends the job, which closes all connections."""
        self._over.set()

    def __exit__(self, *_: object) -> None:
        self.end_job()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            while not self._over.is_set():
                with contextlib.suppress(TimeoutError, BrokenPipeError):
                    sock, _ = self._listener.accept()
                    sock.settimeout(LONG)
                    stack.callback(sock.close)
                    sock.sendall(self._data)
                    if not self._hangs:
                        sock.close()


MESSAGE = json.dumps(json.loads(RECORDED)).encode() + b"\n"


def _top(socket_folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "ringjax", "top", *words],
        env=environment("top", {"TMPDIR": str(socket_folder.parent)}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=40,
    )


def test_once_prints_one_block(socket_folder: Path) -> None:
    with Ringrun(MESSAGE * 3, hangs=True):
        done = _top(socket_folder, "--once")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.count("4 ranks on 2 hosts") == 1
    assert "\x1b" not in done.stdout  # standard output is not a terminal


def test_a_view_is_a_line_of_json(socket_folder: Path) -> None:
    message = json.dumps({**json.loads(RECORDED), "time": SHARES}).encode() + b"\n"
    with Ringrun(message * 3, hangs=True):
        done = _top(socket_folder, "--once", "--json")
    assert done.returncode == 0 and done.stderr == ""
    found = json.loads(done.stdout)
    assert found["shares"] == SHARES and len(found["view"]["rows"]) == 4


def test_the_end_of_a_job_is_printed(socket_folder: Path) -> None:
    with Ringrun(MESSAGE * 3):
        done = _top(socket_folder)
    assert done.returncode == 0 and "4 ranks on 2 hosts" in done.stdout
    assert done.stderr == "ringjax top: the job is over\n"


def test_a_closed_output_pipe_ends_top(socket_folder: Path) -> None:
    with Ringrun(MESSAGE * 3, hangs=True):
        words = [sys.executable, "-P", "-m", "ringjax", "top", "-i", "0.1"]
        top = subprocess.Popen(
            words,
            env=environment("top", {"TMPDIR": str(socket_folder.parent)}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with top:
            assert top.stdout is not None and top.stderr is not None
            assert top.stdout.readline()
            top.stdout.close()
            assert (top.wait(40), top.stderr.read()) == (0, b"")


@pytest.mark.parametrize("data", [b"nonsense\n", b"\xff\xfe\n", b'{"view": 3}\n'])
def test_malformed_messages_print_no_traceback(
    socket_folder: Path, data: bytes
) -> None:
    with Ringrun(data, hangs=True):
        done = _top(socket_folder, "--once")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("ringjax top: ") and done.stderr.count("\n") == 1


def test_a_missing_job_is_an_error(socket_folder: Path) -> None:
    done = _top(socket_folder)
    assert done.returncode == 1
    assert done.stderr.startswith("ringjax top: no running job of this user is found")


def test_only_the_newest_message_is_returned(socket_folder: Path) -> None:
    older = json.dumps({**json.loads(RECORDED), "job": {"pid": 1}}).encode() + b"\n"
    with Ringrun(older + MESSAGE, hangs=True) as ringrun:
        job = JobConnection(ringrun.path)
        with contextlib.closing(job):
            found = job.read(5.0)
            assert found is not None and found.pid != 1
            assert job.read(0.05) is None


def test_a_closed_connection_raises_job_ended(socket_folder: Path) -> None:
    with Ringrun(b"") as ringrun:
        job = JobConnection(ringrun.path)
        with contextlib.closing(job), pytest.raises(JobEnded):
            job.read(5.0)


WITHOUT_RICH = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "rich" else found(name)
from ringjax.top import cli
sys.exit(cli.main([]))
"""


@pytest.mark.parametrize("words", [["-m", "ringjax", "top"], ["-c", WITHOUT_RICH]])
@pytest.mark.parametrize("end", [b"q", b"\x03", None])
def test_top_on_a_terminal(
    socket_folder: Path, words: list[str], end: bytes | None
) -> None:
    """`q`, Ctrl-C or the end of the job end top, and the terminal is restored."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    before = termios.tcgetattr(theirs)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, theirs)
        stack.callback(os.close, ours)
        ringrun = stack.enter_context(Ringrun(MESSAGE * 3, hangs=True))
        process = subprocess.Popen(
            [sys.executable, "-P", *words],
            env=environment(
                "top", {"TMPDIR": str(socket_folder.parent), "TERM": "xterm"}
            ),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        rich = words[0] == "-m"
        text = _read_until(ours, b"q: quit" if rich else b"joined as rank")
        assert text.startswith(b"\x1b[?1049h")  # the terminal keeps the screen below
        assert b"node-b" in text and b"was killed by signal 9" in text
        if end is None:
            ringrun.end_job()
        else:
            os.write(ours, end)
        text = _read_until(ours, b"\x1b[?1049l")
        assert b"Traceback" not in text
        assert process.wait(LONG) == 0
        assert termios.tcgetattr(theirs) == before


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # A shell script starts background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _read_until(terminal: int, wanted: bytes) -> bytes:
    text = b""
    while wanted not in text:
        assert wait_readable(terminal, LONG), text
        text += os.read(terminal, 1 << 16)
    return text


def test_the_head_names_the_fabric_between_hosts() -> None:
    def first_line(hosts: int, fabric: str) -> str:
        view = View(1.0, size=8, hosts=hosts, fabric=fabric)
        return table.head(JobStatus(view, 1, "python", False, 0.0, 0, 0, []))[0]

    assert "8 ranks on 2 hosts over efa " in first_line(2, "efa")
    assert "over" not in first_line(1, "efa") + first_line(2, "")
