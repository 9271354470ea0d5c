"""Stack probe and stack sampler: find the line of code that the main thread executes.

The sampler takes periodic samples, for profiles and reports. The probe replies to
requests of ranks that wait for this rank:

A rank that waits long in a collective sends a request to the late ranks, over the
heartbeat's sockets. Two threads of the late rank work on the reply:

1. The heartbeat, a native thread that never takes the GIL, receives the request. If
   this rank has already made the call, that is the whole reply. If not, the heartbeat
   writes to the probe's eventfd.
2. The probe, a Python thread, wakes up, finds the line of user code that the main
   thread is executing, and hands it to the heartbeat, which sends the reply.

The heartbeat waits half a second for the probe. If the probe cannot get the GIL in that
time, the reply is "its interpreter is busy". The late rank itself prints its full
stack, once for each call that other ranks wait for. The native part of the protocol is
xla_ext/engine/heartbeat/probe_responder.h.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

from ringjax import config
from ringjax.monitor import locations

SAMPLE_INTERVAL = 0.05  # seconds between two samples
_WINDOW = 10.0  # seconds of samples after which all weights are halved
_MAX_WEIGHT = 2.0  # seconds; a sample stands for no more, for example after a pause
_JAX_COMPILER_FILES = ("jax/_src/compiler.py", "jax/_src/compilation_cache.py")
_MAX_FRAMES, _MAX_STACK_CHARS = 40, 8 << 10
# Directories of code that is not the user's: ringjax, standard library, packages.
_RINGJAX_DIR = os.path.dirname(os.path.abspath(config.__file__)) + os.sep
_LIBRARY_DIRS = tuple(
    path + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)


class ProbeRequests(Protocol):
    """The methods of `ringjax._native.Heartbeat` that the probe uses."""

    def asked(self) -> tuple[int, list[str]]:
        """Returns the requests that wait for a reply.

        Returns the sequence number of the newest request, or 0 if there is none, and
        one sentence for each call that other ranks have begun to wait for since the
        last `asked`.
        """

    def answer(self, newest: int, location: str) -> None:
        """Replies to every request whose sequence number is at most `newest`."""


class StackProbe:
    """A thread that replies to the stack requests that heartbeats receive.

    An elastic job replaces its heartbeat in every epoch, so heartbeats are registered
    and unregistered while the probe runs.
    """

    def __init__(self, log: Callable[[str, str], None]) -> None:
        # The eventfd to which heartbeats write, or -1 after `close`.
        self.wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._log = log  # receives a level and a text
        self._heartbeats: list[ProbeRequests] = []
        self._lock = threading.Lock()  # guards _heartbeats
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, name="ringjax-stack-probe", daemon=True
        )
        self._thread.start()

    def register(self, heartbeat: ProbeRequests) -> None:
        """Starts replying to the requests that `heartbeat` receives."""
        with self._lock:
            self._heartbeats.append(heartbeat)

    def unregister(self, heartbeat: ProbeRequests) -> None:
        """Stops replying to requests of `heartbeat`, if it is registered."""
        with self._lock, contextlib.suppress(ValueError):
            self._heartbeats.remove(heartbeat)

    def close(self) -> None:
        """Ends the thread and closes the eventfd. Further calls do nothing."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self.wakeup_fd, 1)
        self._thread.join(5.0)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Closes a forked child's copy of the eventfd. The child has no thread."""
        with contextlib.suppress(OSError):
            os.close(self.wakeup_fd)
        self.wakeup_fd = -1

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self.wakeup_fd, select.POLLIN)
        while not self._closing:
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.wakeup_fd)
            if not self._closing:
                try:
                    self._reply()
                except Exception as error:  # the next request may succeed
                    why = f"{type(error).__name__}: {error}"
                    self._log("warning", f"where this rank is cannot be told: {why}")

    def _reply(self) -> None:
        with self._lock:
            heartbeats = list(self._heartbeats)
        frame = _main_frame()
        stalled_calls: list[str] = []
        for heartbeat in heartbeats:
            newest, new = heartbeat.asked()
            if newest:
                heartbeat.answer(newest, describe_location(frame))
            stalled_calls += new
        # Print only after all replies. Formatting a stack reads source files, which may
        # take longer than the half second for which a heartbeat waits.
        for call in stalled_calls:
            stack = format_stack(frame)
            self._log("warning", f"{call}; the main thread is at\n{stack}")


def _main_frame() -> FrameType | None:
    ident = threading.main_thread().ident
    return None if ident is None else sys._current_frames().get(ident)


def describe_location(frame: FrameType | None) -> str:
    """Describes the line of user code that the main thread is executing, as a clause.

    The clause is, for example, ``"it is at train.py:41 in load_batch"``. It describes
    the innermost frame outside ringjax, the standard library and installed packages. If
    the stack has no such frame, the clause describes the innermost frame, which is
    `frame`.

    Examples:
        >>> import sys
        >>> describe_location(sys._getframe()).startswith("it is at ")
        True
        >>> describe_location(None)
        'its main thread has ended'
    """
    if frame is None:
        return "its main thread has ended"
    shown = next((f for f in _outwards(frame) if _is_user_code(f)), frame)
    code = shown.f_code
    file = os.path.basename(code.co_filename)
    return f"it is at {file}:{shown.f_lineno} in {code.co_name}"


def main_thread_activity() -> str:
    """Returns file, line and function of the main thread's innermost user code.

    Adds ``" (compiling)"`` if JAX is compiling, or ``" (exchanging)"`` if the innermost
    frame is in ringjax.
    """
    frame = _main_frame()
    if frame is not None and not any(map(_is_user_code, _outwards(frame))):
        # The main thread keeps running. If the frame returned before its callers were
        # read, its f_back is None and the frames of the user are missing, so read the
        # stack again.
        frame = _main_frame()
    location = describe_location(frame).removeprefix("it is at ")
    if frame is None:
        return location
    if frame.f_code.co_filename.startswith(_RINGJAX_DIR):
        return location + locations.IN_COLLECTIVE
    files = (f.f_code.co_filename for f in _outwards(frame))
    if any(file.endswith(_JAX_COMPILER_FILES) for file in files):
        return f"{location} (compiling)"
    return location


def format_stack(frame: FrameType | None) -> str:
    """Formats the innermost 40 frames as a traceback of at most 8 Ki characters."""
    if frame is None:
        return "(it has ended)"
    lines = traceback.format_list(traceback.extract_stack(frame, limit=_MAX_FRAMES))
    text = "".join(lines).rstrip()
    return text if len(text) <= _MAX_STACK_CHARS else "..." + text[-_MAX_STACK_CHARS:]


def _outwards(frame: FrameType) -> Iterator[FrameType]:
    """Yields `frame` and its callers, innermost first."""
    at: FrameType | None = frame
    while at is not None:
        yield at
        at = at.f_back


def _is_user_code(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith("<frozen "):
        return False
    # "<stdin>", "<string>" and "<ipython-input-1>" are user code, and are not paths.
    path = os.path.abspath(path) if not path.startswith("<") else path
    return not path.startswith((_RINGJAX_DIR, *_LIBRARY_DIRS))


class StackSampler:
    """Measures at which lines of code the main thread spends its time.

    Each sample stands for the time since the previous sample, because no thread can
    take samples while the program holds the GIL. All times are halved
    now and then, so that recent samples have more weight. Time in the garbage collector
    is counted separately.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._sampled_at = time.monotonic()
        self._collection_began = self._collection_seconds = 0.0
        self._has_callback = False

    def sample(self) -> None:
        """Adds the time since the last sample to the line that is executed now."""
        if not self._has_callback:
            self._has_callback = True
            gc.callbacks.append(_gc_callback(weakref.WeakMethod(self._on_collection)))
        now = time.monotonic()
        spent, self._sampled_at = min(now - self._sampled_at, _MAX_WEIGHT), now
        collected = min(self._collection_seconds, spent)
        self._collection_seconds = 0.0
        self._seconds[main_thread_activity()] += spent - collected
        self._seconds[locations.GARBAGE_COLLECTION] += collected
        if sum(self._seconds.values()) >= _WINDOW:
            for location in list(self._seconds):
                self._seconds[location] /= 2
                if self._seconds[location] < SAMPLE_INTERVAL / 4:
                    del self._seconds[location]

    @property
    def shares(self) -> str:
        """Returns the lines with the largest times, packed by `monitor.locations`."""
        return locations.pack_shares(self._seconds)

    def _on_collection(self, phase: str) -> None:
        now = time.monotonic()
        if phase == "start":
            self._collection_began = now
        elif self._collection_began:
            self._collection_seconds += now - self._collection_began
            self._collection_began = 0.0


def _gc_callback(
    method: weakref.WeakMethod[Callable[[str], None]],
) -> Callable[[str, dict[str, int]], None]:
    """Returns a callback for `gc` that unregisters itself if its sampler is gone."""

    def on_collection(phase: str, info: dict[str, int]) -> None:
        del info
        on_phase = method()
        if on_phase is not None:
            on_phase(phase)
        elif on_collection in gc.callbacks:
            gc.callbacks.remove(on_collection)

    return on_collection
