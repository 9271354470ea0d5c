"""JAX's own trace of this process, for a while, beside a profile of ours.

Only where the program has loaded JAX. There is one trace in a process at a time, and
the program's has precedence: if it makes one, that goes on, and we have none; if it
begins one during ours, ours ends there.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from pathlib import Path
from typing import Any


def loaded() -> bool:
    """Whether the program uses JAX."""
    return "jax" in sys.modules


class JaxTrace:
    """Begins at once.

    Args:
        folder: gets what jax.profiler writes.

    Raises:
        RuntimeError: there is one already.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._found: tuple[str, int] | None = None
        self._over = False
        self._profiler: Any = sys.modules["jax"].profiler
        start = self._profiler.start_trace
        options = self._profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python: far too much
        start(str(folder), profiler_options=options)
        # Where jax.profiler's functions look for each other, too; from jax 0.12 on a
        # trace is a session.
        inner = sys.modules[start.__module__]
        self._doors = [(home, "start_trace", start) for home in (self._profiler, inner)]
        if (session := getattr(inner, "ProfileSession", None)) is not None:
            self._doors.append((session, "start", session.start))
        for home, name, door in self._doors:
            setattr(home, name, self._give_way_to(door))

    def _give_way_to(self, door: Any) -> Any:
        """What the program calls to begin a trace of its own."""

        @functools.wraps(door)
        def begin(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):  # whoever ends ours hears of it
                self.end()
            return door(*args, **kwargs)

        return begin

    def end(self) -> tuple[str, int]:
        """Writes it, once.

        Returns:
            The name of its JSON below the folder, and the nanoseconds since 1970 that
            its times count from.

        Raises:
            RuntimeError, OSError: it could not be written, or ended by somebody else.
        """
        with self._lock:
            if not self._over:
                self._over = True  # whatever happens: the next one is not ours to stop
                for home, name, door in self._doors:
                    setattr(home, name, door)
                self._profiler.stop_trace()
                self._found = self._written()
        if self._found is None:
            raise RuntimeError("it could not be ended")
        return self._found

    def _written(self) -> tuple[str, int]:
        found = sorted(self._folder.rglob("*.trace.json.gz"))
        spaces = sorted(self._folder.rglob("*.xplane.pb"))
        if not found or not spaces:
            raise RuntimeError("jax.profiler has written nothing")
        began = 0
        with warnings.catch_warnings():
            # From Python 3.12 on the first look at `stats` warns of how its type was
            # made, and where warnings are errors that aborts the process.
            warnings.simplefilter("ignore")
            space = self._profiler.ProfileData.from_file(str(spaces[-1]))
            for plane in space.planes:
                began = int(dict(plane.stats).get("profile_start_time", began))
        return str(found[-1].relative_to(self._folder)), began
