"""JAX's own trace of this process, recorded for a while as a part of a profile.

JAX allows one trace in a process at a time, and the program's trace has precedence: if
the program is tracing already, ringjax records none; if it starts a trace while
ringjax records, ringjax's trace ends first.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def is_jax_loaded() -> bool:
    return "jax" in sys.modules


class JaxTrace:
    """A trace by jax.profiler, which starts at once. The program must use JAX.

    Raises:
        RuntimeError: JAX is recording a trace already.
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
        # Replace the functions by which the program may start a trace, in the public
        # module and in the private module of jax.profiler. From jax 0.12 on, the
        # method `ProfileSession.start` starts traces, too.
        private = sys.modules[start.__module__]
        self._originals: list[tuple[Any, str, Any]] = [
            (module, "start_trace", start) for module in (self._profiler, private)
        ]
        if (session := getattr(private, "ProfileSession", None)) is not None:
            self._originals.append((session, "start", session.start))
        for owner, name, original in self._originals:
            setattr(owner, name, self._end_before(original))

    def _end_before(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Wraps a function that starts a trace, so that this trace ends before."""

        @functools.wraps(function)
        def start(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            # The recording thread calls `end`, too, and gets the error there.
            with contextlib.suppress(Exception):
                self.end()
            return function(*args, **kwargs)

        return start

    def end(self) -> tuple[str, int]:
        """Ends the trace and writes its files, once.

        Returns:
            The path of the JSON file below the folder, and the time from which its
            times count, in nanoseconds since 1970.

        Raises:
            RuntimeError, OSError: the trace could not be written, or the program has
                ended it.
        """
        with self._lock:
            if not self._over:
                # Set first: after an error, a later trace is not ours to stop.
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
            # From Python 3.12 on the first access to `stats` warns about the type of
            # the object. Where warnings are errors, that would abort the process.
            warnings.simplefilter("ignore")
            space = self._profiler.ProfileData.from_file(str(spaces[-1]))
            for plane in space.planes:
                began = int(dict(plane.stats).get("profile_start_time", began))
        return str(traces[-1].relative_to(self._folder)), began
