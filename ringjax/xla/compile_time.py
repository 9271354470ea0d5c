"""Counts the time in which JAX traces and compiles programs, and orbax writes them.

Both tell their times to listeners of `jax.monitoring`, and only when they compile or
write, so a step that runs a compiled program costs nothing.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from jax import monitoring

from ringjax.world.time_spent import spent

_COMPILE = "/jax/core/compile/"
# Orbax reports here how long the program waited for a checkpoint, also of one that a
# thread goes on to write.
_CHECKPOINT = (
    "/jax/orbax/write/blocking_duration_secs",
    "/jax/orbax/write/async/blocking_duration_secs",
)


@functools.cache
def watch() -> None:
    """Begins to count in this process. Further calls do nothing."""
    monitoring.register_event_duration_secs_listener(_on_duration)


def _on_duration(event: str, duration_secs: float, **_: Any) -> None:
    if event.startswith(_COMPILE):
        spent.ended("compile", duration_secs)
    # Training goes on while another thread waits for its checkpoint.
    elif event in _CHECKPOINT and _is_main_thread():
        spent.ended("checkpoints", duration_secs)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
