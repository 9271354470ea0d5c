"""Records a profile on one rank: a thread writes the recorder's calls to a part file.

The file also contains readings of the clock of rank 0, which put all ranks on one time
base, and the number of bytes that each link has carried. profile/ merges and reads the
files of all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from ringjax import _native
from ringjax.world.epoch import Epoch
from ringjax.world.part_file import PartFile
from ringjax.world.recorder import RECORDER_CAPACITY
from ringjax.world.step_counter import StepCounter

FORMAT = 1
PARTS = "parts"  # the folder of the part files, in the folder of the profile
_POLL_INTERVAL = 0.2  # seconds between two reads of the recorder
_CAPACITY = 1 << 14  # calls that the recorder keeps between two polls
_CLOCK_REQUESTS = 16  # clock requests at the start of each epoch and at the end
_CLOCK_INTERVAL = 1.0  # seconds between two clock readings
_CLOCK_TIMEOUT = 0.03  # seconds to wait for the last readings
_JAX_SECONDS = 5.0  # the length of JAX's trace, which is kept in memory
_P = ParamSpec("_P")
_T = TypeVar("_T")


class ProfileSource(Protocol):
    """The attributes of `World` that the recording of a profile needs."""

    recorder: _native.Recorder

    @property
    def current_epoch(self) -> Epoch | None:
        """The epoch in force, or None while this rank is in no epoch."""

    @property
    def communicators(self) -> dict[int, _native.Communicator]:
        """The communicators on which the program's calls run, by id."""

    def log(self, level: str, text: str) -> None: ...


def clock_id() -> str:
    """Returns an id of the monotonic clock; processes with one id share the clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return socket.gethostname()


class ProfileRecording:
    """A recording that begins at once and ends by `end` or after `steps` steps.

    `run` is the id of the profile, equal on all ranks, and `name` the name of this
    process, such as "rank 3". With `steps=0` there is no limit. `jax_trace` says
    whether JAX records a trace, too. If it is None, JAX's trace begins when a compiled
    program calls a collective. Raises OSError if the folder cannot be written.
    """

    def __init__(
        self,
        source: ProfileSource,
        directory: Path,
        run: str,
        name: str,
        *,
        steps: int = 0,
        jax_trace: bool | None = None,
    ) -> None:
        self._source, self.run = source, run
        self._steps = StepCounter(steps) if steps else None
        self._wants_jax = jax_trace
        self._part = PartFile(
            directory.absolute() / PARTS / f"{run}.{name.replace(' ', '-')}.jsonl",
            lambda why: source.log(
                "warning", f"the profile of {name} ends here: {why}"
            ),
        )
        self._heartbeat: _native.Heartbeat | None = None
        self._epoch, self._size = -1, 0
        self._traffic: tuple[int, float] = (0, 0.0)
        self._clock_requested_at = 0.0
        self._jax: JaxTrace | None = None
        self._jax_until = 0.0
        self._stop = threading.Event()
        source.recorder.keep(_CAPACITY)
        self._seen_calls = source.recorder.count
        self._part.write_header(
            format=FORMAT,
            run=run,
            who=name,
            pid=os.getpid(),
            host=socket.gethostname(),
            clock=clock_id(),
            monotonic=time.monotonic(),
            realtime=time.time(),
        )
        self._check_epoch()
        if jax_trace:
            self._begin_jax_trace()
        self._thread = threading.Thread(
            target=self._run, name="ringjax-profile", daemon=True
        )
        self._thread.start()

    def mark_step(self) -> None:
        """Records that the program has reached the end of a training step."""
        self._part.write_record(step=time.monotonic())

    def end(self) -> None:
        """Writes the remaining calls and closes the file. Further calls do nothing."""
        self._stop.set()
        self._thread.join(30.0)

    def _run(self) -> None:
        why = ""
        try:
            while not self._stop.wait(_POLL_INTERVAL) and not self._poll():
                pass
            self._request_clock(_CLOCK_REQUESTS)
            time.sleep(_CLOCK_TIMEOUT)  # the heartbeat's thread receives them meanwhile
            self._write_clock()
            if self._stop.is_set():
                self._poll()
        except Exception as error:  # a failing profile must not fail the program
            why = f"{type(error).__name__}: {error}"
            self._source.log("warning", f"the profile ends here: {why}")
        self._end_jax_trace()
        self._source.recorder.keep(RECORDER_CAPACITY)
        # The job size in this last record tells rank 0 how many part files to wait for.
        self._part.write_record(
            end=time.monotonic(), why=why, epoch=self._epoch, size=self._size
        )
        self._part.close()

    def _poll(self) -> bool:
        """Writes new calls. Returns whether enough steps have been recorded."""
        self._check_epoch()
        if time.monotonic() - self._clock_requested_at > _CLOCK_INTERVAL:
            self._request_clock(2)
        self._write_clock()
        self._write_traffic()
        recorder = self._source.recorder
        self._seen_calls, lost, lines = recorder.lines_since(self._seen_calls)
        if lost:
            self._part.write_record(lost=lost, at=time.monotonic())
        steps = self._steps
        if steps is not None:
            if steps.over:
                return True
            lines = steps.cut(lines)
        self._part.write_lines(lines)
        is_compiled = b'"compiled"' in lines or b'"jax"' in lines
        if self._wants_jax is None and is_compiled and "jax" in sys.modules:
            self._begin_jax_trace()
        if self._jax is not None and time.monotonic() > self._jax_until:
            self._end_jax_trace()
        return steps is not None and steps.over

    # -- ranks, clocks and links -------------------------------------------------------

    def _check_epoch(self) -> None:
        epoch = self._source.current_epoch
        communicator = self._source.communicators.get(0)
        if epoch is None or communicator is None or communicator.epoch == self._epoch:
            return
        self._heartbeat, self._epoch = epoch.heartbeat, communicator.epoch
        rank, self._size = epoch.rank_info.rank, epoch.rank_info.size
        self._part.write_header(
            epoch=self._epoch,
            rank=rank,
            size=self._size,
            host=epoch.hostname_of(rank) or socket.gethostname(),
            at=time.monotonic(),
        )
        self._request_clock(_CLOCK_REQUESTS)

    def _request_clock(self, times: int) -> None:
        self._clock_requested_at = time.monotonic()
        if self._heartbeat is not None:
            self._heartbeat.ask_clock(times)

    def _write_clock(self) -> None:
        if self._heartbeat is None:
            return
        readings = self._heartbeat.take_clocks()
        if readings:
            # The shorter the round trip, the smaller the error of the clock offset.
            rank, when, ahead, trip = min(readings, key=lambda reading: reading[3])
            self._part.write_record(
                clock=rank, epoch=self._epoch, when=when, ahead=ahead, trip=trip
            )

    def _write_traffic(self) -> None:
        sent, exposed = 0, 0.0
        for communicator in list(self._source.communicators.values()):
            stats = communicator.stats()
            exposed += stats.get("overlap", {}).get("exposed_seconds", 0.0)
            sent += sum(entry.get("sent_bytes", 0) for entry in stats.values())
        if (sent, exposed) != self._traffic:
            self._traffic = (sent, exposed)
            self._part.write_record(sent=sent, exposed=exposed, at=time.monotonic())

    # -- JAX's own trace ---------------------------------------------------------------

    def _begin_jax_trace(self) -> None:
        self._wants_jax = False
        if "jax" not in sys.modules:
            return
        try:
            self._jax = JaxTrace(self._part.path.with_suffix(".jax"))
            self._jax_until = time.monotonic() + _JAX_SECONDS
        except Exception as error:  # for example, the program is recording a trace
            self._part.write_record(jax_absent=f"{type(error).__name__}: {error}")

    def _end_jax_trace(self) -> None:
        trace, self._jax = self._jax, None
        if trace is None:
            return
        try:
            name, began = trace.end()
            self._part.write_record(jax=name, began=began)
        except Exception as error:
            self._part.write_record(jax_absent=f"{type(error).__name__}: {error}")


class JaxTrace:
    """A trace by jax.profiler, which starts at once. JAX must be imported already.

    JAX allows one trace in a process at a time, and the program's trace has precedence.
    If the program is tracing already, the constructor raises RuntimeError. If the
    program starts a trace later, this trace ends first.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._written: tuple[str, int] | None = None
        self._over = False
        self._profiler: Any = sys.modules["jax"].profiler
        start = self._profiler.start_trace
        options = self._profiler.ProfileOptions()
        options.python_tracer_level = 0  # no event for each call of a Python function
        start(str(folder), profiler_options=options)
        # Replace the functions with which the program can start a trace, in the public
        # module and in the private module of jax.profiler. Since jax 0.12, the method
        # `ProfileSession.start` starts traces, too.
        private = sys.modules[start.__module__]
        self._originals: list[tuple[Any, str, Any]] = [
            (module, "start_trace", start) for module in (self._profiler, private)
        ]
        if (session := getattr(private, "ProfileSession", None)) is not None:
            self._originals.append((session, "start", session.start))
        for owner, name, original in self._originals:
            setattr(owner, name, self._end_before(original))

    def _end_before(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Wraps a function that starts a trace, so that it ends this trace first."""

        @functools.wraps(function)
        def start(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            # The recording thread calls `end`, too, and handles the error there.
            with contextlib.suppress(Exception):
                self.end()
            return function(*args, **kwargs)

        return start

    def end(self) -> tuple[str, int]:
        """Ends the trace and writes its files. Further calls only return the result.

        Returns the path of the JSON file in the folder, and the zero point of the
        trace's times in nanoseconds since 1970. Raises RuntimeError or OSError if the
        trace could not be written, or if the program has ended the trace.
        """
        with self._lock:
            if not self._over:
                # Set this first: if `stop_trace` fails, a trace that runs later is the
                # program's.
                self._over = True
                for owner, name, original in self._originals:
                    setattr(owner, name, original)
                self._profiler.stop_trace()
                self._written = self._find_files()
        if self._written is None:
            raise RuntimeError("it could not be ended")
        return self._written

    def _find_files(self) -> tuple[str, int]:
        traces = sorted(self._folder.rglob("*.trace.json.gz"))
        spaces = sorted(self._folder.rglob("*.xplane.pb"))
        if not traces or not spaces:
            raise RuntimeError("jax.profiler has written nothing")
        began = 0
        with warnings.catch_warnings():
            # Since Python 3.12 the first access to `stats` warns about the type of the
            # object. If warnings are errors, that warning would abort the process.
            warnings.simplefilter("ignore")
            space = self._profiler.ProfileData.from_file(str(spaces[-1]))
            for plane in space.planes:
                began = int(dict(plane.stats).get("profile_start_time", began))
        return str(traces[-1].relative_to(self._folder)), began
