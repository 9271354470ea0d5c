"""The handle of an eager operation: polls it, and waits for its result.

An operation is submitted in `lane.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringjax import _native, errors

# How a finished operation becomes the caller's result.
Finish = Callable[[Any], Any]


def _finished(_: Any) -> None:
    """The result, the second time."""


class Handle:
    """An operation under way. Give it to `poll` and `synchronize`.

    The operation goes on, and keeps what it needs, also if its handle is forgotten.
    """

    __slots__ = ("_finish", "_work")

    def __init__(self, work: Any, finish: Finish) -> None:
        self._work: Any = work
        self._finish = finish

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._work is None or bool(self._work.done)

    def wait(self) -> Any:
        """The result. A handle gives it once; after that it is None.

        Raises:
            Mismatch: the ranks do not agree about the operation. On every rank.
            Stalled: some ranks have not submitted it in time.
            PeerLost: a rank is gone.
        """
        work = self._work
        if work is None:
            return None
        try:
            work.wait()
        except _native.StatusError as error:
            self._work = None
            raise errors.from_status(error) from None
        self._work = None
        # What finishes it refers to the tensors: whoever keeps the handle does not.
        finish, self._finish = self._finish, _finished
        return finish(work)


def poll(handle: Handle) -> bool:
    """Whether the operation has ended, so that `synchronize` returns at once.

    Raises:
        ValueError: `handle` is not one.
    """
    if not isinstance(handle, Handle):
        raise ValueError(f"poll: {handle!r} is not the handle of an operation")
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Waits for the operation and returns its result, as `Handle.wait`.

    Returns:
        The result; None for a handle that has given it before, and for what is none.

    Raises: as `Handle.wait`.
    """
    return handle.wait() if isinstance(handle, Handle) else None
