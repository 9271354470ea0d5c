"""A timeline of the eager lanes: start and stop a Chrome trace while the job runs.

What is recorded and in which format is in xla_ext/engine/eager/timeline.h. Only rank 0
writes, as in Horovod: a round tells it what every rank has submitted. Compiled programs
are not in it: use `jax.profiler` for those.
"""

from __future__ import annotations

import os

from ringjax import _native, runtime

__all__ = ["start_timeline", "stop_timeline"]


def start_timeline(
    file_path: str | os.PathLike[str], mark_cycles: bool = False
) -> None:
    """Begins to record what named operations do, on rank 0; nothing on other ranks.

    Replaces the file, which is valid JSON at any time, and ends a recording that is
    under way. `RINGJAX_TIMELINE=path` (or `HOROVOD_TIMELINE`) begins one at `init`.

    Args:
        file_path: where to write; open it with https://ui.perfetto.dev.
        mark_cycles: also mark the rounds in which the ranks negotiate.

    Raises:
        NotInitialized: before `init`.
        ValueError: the file cannot be written.

    Example:
        >>> import os, tempfile, ringjax, ringjax.timeline
        >>> ringjax.init()
        >>> path = os.path.join(tempfile.mkdtemp(), "trace.json")
        >>> ringjax.timeline.start_timeline(path)
        >>> ringjax.timeline.stop_timeline()
        >>> os.path.exists(path)
        True
    """
    world = runtime.current("start_timeline")
    if world.rank != 0:
        return
    try:
        timeline = _native.Timeline(os.fspath(file_path), mark_cycles)
    except _native.StatusError as error:
        raise ValueError(f"ringjax.start_timeline: {error}") from error
    world.lanes.record(timeline)


def stop_timeline() -> None:
    """Ends the recording, if there is one; the file is complete when this returns.

    Raises:
        NotInitialized: before `init`.
    """
    runtime.current("stop_timeline").lanes.record(None)
