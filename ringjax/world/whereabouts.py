"""Where this rank's program is: for other ranks, which wait for it and ask.

The heartbeat hears the question, in a thread without the interpreter's lock, and rings;
a thread here looks at the stack of the main thread and says which line of the user's it
has come to. If the interpreter is busy for long, the heartbeat answers that. What the
whole stack looks like, this rank prints itself, once for each thing others wait for.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

from ringjax import config
from ringjax.monitor.locations import IN_COLLECTIVE

_COMPILERS = ("jax/_src/compiler.py", "jax/_src/compilation_cache.py")
_MOST_FRAMES, _MOST_BYTES = 40, 8 << 10  # of a stack that is printed
# Not the user's code: this package, and whatever is installed or comes with Python.
_OURS = os.path.dirname(os.path.abspath(config.__file__)) + os.sep  # all of ringjax
_INSTALLED = tuple(
    path + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)


class Asker(Protocol):
    """What is needed of a heartbeat: see `_native.Heartbeat`."""

    def asked(self) -> tuple[int, list[str]]:
        """The number of the newest question, 0 for none, and what is new to print."""

    def answer(self, newest: int, place: str) -> None:
        """Answers the questions up to that one."""


class Whereabouts:
    """Answers for the heartbeats of this process, in a thread of its own.

    Args:
        log: takes a level and a sentence.

    Attributes:
        bell: an eventfd that heartbeats ring.
    """

    def __init__(self, log: Callable[[str, str], None]) -> None:
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._log = log
        self._heartbeats: list[Asker] = []
        self._lock = threading.Lock()  # of that list
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, name="ringjax-whereabouts", daemon=True
        )
        self._thread.start()

    def serve(self, heartbeat: Asker) -> None:
        """Answers what this heartbeat is asked from now on."""
        with self._lock:
            self._heartbeats.append(heartbeat)

    def forget(self, heartbeat: Asker) -> None:
        """Answers it no more."""
        with self._lock, contextlib.suppress(ValueError):
            self._heartbeats.remove(heartbeat)

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self.bell, 1)
        self._thread.join(5.0)
        self.release()

    def release(self) -> None:
        """Closes the eventfd, also in a forked child, which has no such thread."""
        with contextlib.suppress(OSError):
            os.close(self.bell)
        self.bell = -1

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self.bell, select.POLLIN)
        while not self._closing:
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.bell)
            if not self._closing:
                try:
                    self._answer()
                except Exception as error:  # the next question may do better
                    why = f"{type(error).__name__}: {error}"
                    self._log("warning", f"where this rank is cannot be told: {why}")

    def _answer(self) -> None:
        with self._lock:
            heartbeats = list(self._heartbeats)
        frame = _main_frame()
        stalls: list[str] = []
        for heartbeat in heartbeats:
            newest, new = heartbeat.asked()
            if newest:
                heartbeat.answer(newest, place(frame))
            stalls += new
        # Afterwards: to read the sources may take long.
        for stall in stalls:
            self._log("warning", f"{stall}; the main thread is at\n{stack(frame)}")


def _main_frame() -> FrameType | None:
    ident = threading.main_thread().ident
    return None if ident is None else sys._current_frames().get(ident)


def place(frame: FrameType | None) -> str:
    """The line of the user's code that a stack has come to, as a clause.

    That is the innermost frame outside of ringjax, of what is installed and of Python's
    library; if there is none, the innermost one.

    Example:
        >>> import sys
        >>> place(sys._getframe()).startswith("it is at ")
        True
    """
    if frame is None:
        return "its main thread has ended"
    mine = next((f for f in _outwards(frame) if _is_users(f)), frame)
    code = mine.f_code
    file = os.path.basename(code.co_filename)
    return f"it is at {file}:{mine.f_lineno} in {code.co_name}"


def doing() -> str:
    """Where the main thread is, "train.py:41 in load"; and if it compiles or exchanges.

    Example:
        >>> ":" in doing()
        True
    """
    frame = _main_frame()
    if frame is not None and not any(map(_is_users, _outwards(frame))):
        # A frame that has ended meanwhile has lost its callers.
        frame = _main_frame()
    where = place(frame).removeprefix("it is at ")
    if frame is None:
        return where
    if frame.f_code.co_filename.startswith(_OURS):
        return where + IN_COLLECTIVE
    if any(f.f_code.co_filename.endswith(_COMPILERS) for f in _outwards(frame)):
        return f"{where} (compiling)"
    return where


def _outwards(frame: FrameType) -> Iterator[FrameType]:
    at: FrameType | None = frame
    while at is not None:
        yield at
        at = at.f_back


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith("<frozen "):
        return False
    path = os.path.abspath(path) if not path.startswith("<") else path
    return not path.startswith((_OURS, *_INSTALLED))


def stack(frame: FrameType | None) -> str:
    """The innermost frames as Python prints them, 8 KiB at most."""
    if frame is None:
        return "(it has ended)"
    lines = traceback.format_list(traceback.extract_stack(frame, limit=_MOST_FRAMES))
    text = "".join(lines).rstrip()
    return text if len(text) <= _MOST_BYTES else "..." + text[-_MOST_BYTES:]
