"""The handle of an eager operation, to poll the operation or wait for its result.

`lane.py` submits operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringjax import _native, errors

# A function that makes the caller's result when the native `Work` has ended.
Finish = Callable[[_native.Work], Any]


class Handle:
    """An operation in progress, for `poll` and `synchronize`.

    If a program drops the handle, the operation continues, and its tensors stay alive
    until the operation ends.
    """

    __slots__ = ("_finish", "_work")

    def __init__(self, work: _native.Work, finish: Finish) -> None:
        self._work: _native.Work | None = work
        self._finish: Finish | None = finish

    def done(self) -> bool:
        """Returns True if `wait` would return immediately."""
        return self._work is None or self._work.done

    def wait(self) -> Any:
        """Waits until the operation has ended.

        Returns:
            The result. A second call returns None, because the handle keeps no result.

        Raises:
            Mismatch: the ranks have submitted different operations under this name. All
                ranks raise this error.
            Stalled: some ranks have not submitted the operation in time.
            PeerLost: a rank is lost.
        """
        work, finish = self._work, self._finish
        if work is None or finish is None:
            return None
        try:
            work.wait()
        except _native.StatusError as error:
            self._work = None
            raise errors.from_status(error) from None
        # `finish` keeps the tensors alive, and a program may keep the handle for a long
        # time. So drop `finish` before making the result.
        self._work = self._finish = None
        return finish(work)


def poll(handle: Handle) -> bool:
    """Returns True if the operation has ended, so that `synchronize` need not wait.

    Raises:
        ValueError: `handle` is not a handle.
    """
    if not isinstance(handle, Handle):
        raise ValueError(f"poll: {handle!r} is not the handle of an operation")
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Waits for the operation and returns its result, as `Handle.wait` does.

    Returns:
        The result; None if the handle has returned its result before, or if `handle`
        is not a handle.

    Raises: as `Handle.wait`.
    """
    return handle.wait() if isinstance(handle, Handle) else None
