"""How many descriptors this process may have, and having the kernel allow more.

A rank has several for each other one, so that some hundred ranks need more than the
1,024 that most systems give at first. A process may raise that up to its hard limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from ringjax.errors import OutOfDescriptors

_SPARE = 1024  # besides, for the program


def allow(more: int) -> int:
    """Lets `more` descriptors be opened, besides those that are open.

    Only as far as needed: there are programs that close every number up to the limit.

    Returns:
        How many of them the hard limit forbids.
    """
    needed = _open_now() + more
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # As a number: RLIM_INFINITY is -1.
    soft, hard = (1 << 31 if n == resource.RLIM_INFINITY else n for n in (soft, hard))
    if soft < needed + _SPARE and soft < hard:
        with contextlib.suppress(OSError, ValueError):
            most = min(needed + _SPARE, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(0, needed - hard)


def require(more: int, what: str) -> None:
    """As `allow`; `what` names who needs them in the error.

    Raises:
        OutOfDescriptors: the hard limit forbids it.
    """
    if missing := allow(more):
        raise OutOfDescriptors(
            f"{what}: {more} descriptors are needed and {missing} of them not allowed: "
            f"{limit_text()}"
        )


def limit_text() -> str:
    """What forbids more, and what to do about it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process may have {soft} (RLIMIT_NOFILE, at most {hard}) and has "
        f"{_open_now()}. Raise it before the job starts: ulimit -n, LimitNOFILE= of "
        "systemd, --ulimit nofile= of docker"
    )


def is_shortage(error: BaseException) -> bool:
    """Whether that is what went wrong: here, in the whole system, or on the way."""
    few = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
    return isinstance(error, OSError) and error.errno in few


def _open_now() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 64
