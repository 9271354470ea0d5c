"""SIGTERM while training: this rank leaves at its next commit, without an error."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from ringjax import runtime


@contextlib.contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Within it the first SIGTERM is a wish to leave; a second one means it.

    Only the main thread may say what a signal does; elsewhere nothing changes.
    """
    before = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is None:  # the latter: set by other code than Python's
        yield
        return

    def leave(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, again)
        # Not here: the interrupted code may hold the locks that this needs.
        threading.Thread(target=runtime.leave_at_next_pause, daemon=True).start()

    def again(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, before)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
