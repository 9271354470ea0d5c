"""The command `ringjax top` connects to the ringrun of a job, and shows its ranks.

While a viewer is connected, ringrun requests samples from the ranks. On a terminal the
view fills the screen, with colors if rich is installed. If the output is no terminal,
each view is printed as a block of text.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ringjax import stdout
from ringjax.control.polling import wait_readable
from ringjax.monitor import sockets
from ringjax.top import table
from ringjax.top.job_connection import JobConnection, JobEnded, JobStatus

_FIRST_TIMEOUT = 15.0  # seconds to wait for a view with ranks
_CLEAR = "\x1b[H\x1b[J"
_ALTERNATE, _BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
Show = Callable[[JobStatus], None]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="ringjax top",
        description="Show the ranks of a running job, on the host of its ringrun.",
        epilog="The view covers the last five to ten seconds. waits, moves: the share "
        "of the time in which calls waited for other ranks, or moved data. last in: "
        "the share of the calls in which the rank came last. late by: its usual delay "
        "in these calls. at: the place where the program is most of the time.",
    )
    add = found.add_argument
    pid = "process id of ringrun, which is needed if this user has several jobs"
    add("pid", nargs="?", help=pid)
    add("--once", action="store_true", help="print one block of text, and end")
    add("--json", action="store_true", help="print each view as one line of JSON")
    add(
        "-i",
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="show a new view every SECONDS (1)",
    )
    return found


def find(wanted: str | None) -> Path:
    """Returns the socket of the job whose ringrun has the process id `wanted`.

    Pass None to find the only job of this user. Raises JobSocketError if no job or more
    than one job is found.
    """
    known = sockets.find_jobs()
    if wanted is not None:
        if not wanted.isdecimal():
            raise sockets.JobSocketError(f"{wanted!r} is no process id")
        known = {pid: paths for pid, paths in known.items() if pid == int(wanted)}
    if not known:
        which = f"ringrun {wanted}" if wanted else "running job of this user"
        raise sockets.JobSocketError(
            f"no {which} is found here, in {sockets.socket_folder()}; "
            "TMPDIR must be ringrun's"
        )
    if len(known) > 1:
        pids = ", ".join(map(str, sorted(known)))
        raise sockets.JobSocketError(
            f"several jobs run: {pids}; say which: ringjax top PID"
        )
    (paths,) = known.values()
    return paths[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `ringjax top`. Returns the exit code: 0, or 1 after an error."""
    options = parser().parse_args(argv)
    try:
        job = JobConnection(find(options.pid))
    except sockets.JobSocketError as error:
        sys.stderr.write(f"ringjax top: {error}\n")
        return 1
    try:
        with contextlib.closing(job), stdout.until_closed():
            _look(job, options)
    except KeyboardInterrupt:
        pass
    except JobEnded:
        sys.stderr.write("ringjax top: the job is over\n")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"ringjax top: {error}\n")
        return 1
    return 0


def _look(job: JobConnection, options: argparse.Namespace) -> None:
    status = _first(job)
    if options.once:
        (_print_json if options.json else _print)(status)
        return
    plain = contextlib.nullcontext((_print_json, lambda: False))
    with plain if options.json else _display() as (show, quits):
        _follow(job, status, max(options.interval, 0.1), show, quits)


def _first(job: JobConnection) -> JobStatus:
    """Waits for a status with ranks. After a timeout, returns the latest status."""
    deadline = time.monotonic() + _FIRST_TIMEOUT
    found = None
    while (left := deadline - time.monotonic()) > 0:
        status = job.read(left)
        found = status or found
        # Wait for two samples of each rank, because shares of time need two samples.
        if status is not None and status.view.rows and status.view.seconds > 2.0:
            return status
    if found is None:
        raise ValueError("ringrun does not answer: is it stopped?")
    return found


def _follow(
    job: JobConnection,
    status: JobStatus,
    every: float,
    show: Show,
    quits: Callable[[], bool],
) -> None:
    due = 0.0
    while not quits():
        if time.monotonic() >= due:
            show(status)
            due = time.monotonic() + every
        status = job.read(0.2) or status


@contextlib.contextmanager
def _display() -> Iterator[tuple[Show, Callable[[], bool]]]:
    """Yields a function that shows a status, and one that tells if the user quits."""
    if not sys.stdout.isatty():
        yield _print, lambda: False
        return
    with contextlib.ExitStack() as stack:
        quits = stack.enter_context(_keys())
        if importlib.util.find_spec("rich") is not None:
            from ringjax.top.screen import Screen

            yield stack.enter_context(Screen()).show, quits
            return
        sys.stdout.write(_ALTERNATE)
        stack.callback(lambda: (sys.stdout.write(_BACK), sys.stdout.flush()))
        yield _redraw, quits


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether the user has typed `q`.

    Inside of the context the terminal is in cbreak mode, because in other modes the
    program receives input only after the user presses Enter.
    """
    if not sys.stdin.isatty():
        yield lambda: False
        return
    before = termios.tcgetattr(sys.stdin)

    def quits() -> bool:
        while wait_readable(sys.stdin, 0.0):
            typed = os.read(sys.stdin.fileno(), 64)
            if not typed or b"q" in typed or b"Q" in typed:
                return True
        return False

    tty.setcbreak(sys.stdin)
    try:
        yield quits
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _print(status: JobStatus) -> None:
    for line in table.lines(status):
        sys.stdout.write(f"{line}\n")
    sys.stdout.write("\n")
    sys.stdout.flush()


def _print_json(status: JobStatus) -> None:
    sys.stdout.write(json.dumps(asdict(status)) + "\n")
    sys.stdout.flush()


def _redraw(status: JobStatus) -> None:
    width, height = shutil.get_terminal_size()
    most = max(1, height - 8 - len(status.events))
    text = list(table.lines(status, width, most))[: height - 1]
    sys.stdout.write(_CLEAR + "\r\n".join(text))
    sys.stdout.flush()
