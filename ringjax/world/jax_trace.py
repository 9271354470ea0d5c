"""JAX's own trace of this process, for a while, beside a profile of ours.

Only where the program has loaded JAX. There is one trace in a process at a time: if the
program makes one, it goes on, and we have none.
"""

from __future__ import annotations

import sys
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
        self._folder = folder
        self._profiler: Any = sys.modules["jax"].profiler
        options = self._profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python: far too much
        self._profiler.start_trace(str(folder), profiler_options=options)

    def end(self) -> tuple[str, int]:
        """Writes it.

        Returns:
            The name of its JSON below the folder, and the nanoseconds since 1970 that
            its times count from.

        Raises:
            RuntimeError, OSError: it could not be written, or ended by somebody else.
        """
        self._profiler.stop_trace()
        found = sorted(self._folder.rglob("*.trace.json.gz"))
        spaces = sorted(self._folder.rglob("*.xplane.pb"))
        if not found or not spaces:
            raise RuntimeError("jax.profiler has written nothing")
        space = self._profiler.ProfileData.from_file(str(spaces[-1]))
        began = 0
        for plane in space.planes:
            began = int(dict(plane.stats).get("profile_start_time", began))
        return str(found[-1].relative_to(self._folder)), began
