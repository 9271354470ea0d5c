"""Raises the limit of open files (RLIMIT_NOFILE), or explains that it is too low.

A rank has several descriptors for each other rank, so a job of some hundred ranks needs
more than the 1,024 that most systems allow by default. A process may raise its soft
limit up to the hard limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from ringjax.errors import OutOfDescriptors

_SPARE = 1024  # additional descriptors, for the user's program


def raise_limit(more: int) -> int:
    """Raises the soft limit so that `more` descriptors can be opened.

    The limit becomes no higher than necessary, because some programs, when they start,
    close every descriptor up to the limit.

    Returns:
        How many of these descriptors the hard limit does not allow.
    """
    needed = _open_now() + more
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # RLIM_INFINITY is -1: replace it, so that limits can be compared.
    soft, hard = (1 << 31 if n == resource.RLIM_INFINITY else n for n in (soft, hard))
    if soft < needed + _SPARE and soft < hard:
        with contextlib.suppress(OSError, ValueError):
            most = min(needed + _SPARE, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(0, needed - hard)


def require(more: int, what: str) -> None:
    """Calls `raise_limit`, and raises OutOfDescriptors if the hard limit is too low.

    The error names `what`, the part of ringjax that needs the descriptors.
    """
    if missing := raise_limit(more):
        raise OutOfDescriptors(
            f"{what}: {more} descriptors are needed and {missing} of them not allowed: "
            f"{limit_text()}"
        )


def limit_text() -> str:
    """Returns a text for errors: the limit, how many files are open, and advice."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process may have {soft} (RLIMIT_NOFILE, at most {hard}) and has "
        f"{_open_now()}. Raise it before the job starts: ulimit -n, LimitNOFILE= of "
        "systemd, --ulimit nofile= of docker"
    )


def is_shortage(error: BaseException) -> bool:
    """Returns whether an error means that no descriptor is free.

    EMFILE is the limit of this process, ENFILE the limit of the system, ETOOMANYREFS
    the limit of descriptors in flight: sent over unix sockets and not yet received.
    """
    few = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
    return isinstance(error, OSError) and error.errno in few


def _open_now() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 64
