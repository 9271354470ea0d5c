"""Waits for one descriptor with `poll`, because `select` fails for fds above 1,023."""

from __future__ import annotations

import math
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike


def wait_readable(fd: FileDescriptorLike, seconds: float | None = None) -> bool:
    """Waits up to `seconds`, or forever if None. Returns whether `fd` is readable."""
    return _wait(fd, select.POLLIN, seconds)


def wait_writable(fd: FileDescriptorLike, seconds: float | None = None) -> bool:
    """Waits up to `seconds`, or forever if None. Returns whether `fd` is writable."""
    return _wait(fd, select.POLLOUT, seconds)


def _wait(fd: FileDescriptorLike, event: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(None if seconds is None else math.ceil(1000 * seconds)))
