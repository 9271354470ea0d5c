"""A timeline of the collectives: start and stop a Chrome trace while the job runs.

What is recorded and in which format is in xla_ext/engine/eager/timeline.h. Only rank 0
writes, as in Horovod: a round tells it what every rank has submitted. All ranks, on one
time base, are in what profile/ writes.
"""

from __future__ import annotations

import os

from ringjax import _native, runtime

__all__ = ["start_timeline", "stop_timeline"]


def start_timeline(
    file_path: str | os.PathLike[str], mark_cycles: bool = False
) -> None:
    """Begins to record all collectives, on rank 0; does nothing on other ranks.

    Named operations are in it as Horovod has them. Calls of compiled programs have rows
    with "(compiled)" behind the name, and of the ranks' marks only this rank's.

    Replaces the file, which is valid JSON at any time, and ends a recording that is
    under way. `RINGJAX_TIMELINE=path` (or `HOROVOD_TIMELINE`) begins one at `init`.
    The newest part is kept: at 128 MB the file becomes `file_path` with ".1" behind
    it, in place of an earlier one, and a new one begins.

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
    world.lanes.set_timeline(timeline)


def stop_timeline() -> None:
    """Ends the recording, if there is one; the file is complete when this returns.

    Raises:
        NotInitialized: before `init`.
    """
    runtime.current("stop_timeline").lanes.set_timeline(None)
