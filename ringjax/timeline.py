"""Timeline: a Chrome trace of the collectives, started and stopped while the job runs.

As in Horovod, rank 0 writes the timeline: it receives each rank's submissions in the
negotiation. xla_ext/engine/eager/timeline.h describes the events. A profile (profile/)
shows all ranks on one time base.
"""

from __future__ import annotations

import os

from ringjax import _native, runtime

__all__ = ["start_timeline", "stop_timeline"]


def start_timeline(
    file_path: str | os.PathLike[str], mark_cycles: bool = False
) -> None:
    """Starts a timeline of all collectives on rank 0; does nothing on other ranks.

    Named operations appear as in Horovod's timeline. The rows of calls of compiled
    programs have "(compiled)" after the name, and show events of rank 0 only.

    A running timeline ends first. An existing file is replaced, and the file is valid
    JSON at any time. At 128 MB it is renamed to `file_path` with ".1" appended, and a
    new file begins, so the newest part is kept. `RINGJAX_TIMELINE=path` (or
    `HOROVOD_TIMELINE`) starts a timeline in `init`.

    Args:
        file_path: the file to write; https://ui.perfetto.dev opens it.
        mark_cycles: whether to mark the rounds in which the ranks negotiate.

    Raises:
        NotInitialized: `init` has not been called.
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
    """Ends a running timeline. The file is complete when this function returns.

    Raises:
        NotInitialized: `init` has not been called.
    """
    runtime.current("stop_timeline").lanes.set_timeline(None)
