"""Threads that wait for operations of graphs, so that TensorFlow's threads need not.

One thread waits for the oldest operation, and then notifies all operations that have
ended by then. Operations may end in any order, so a second thread polls the younger
operations.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from ringjax import stderr
from ringjax.tensorflow.pending_operations import PendingOperation

_POLL_INTERVAL = 0.002  # seconds between two polls of the younger operations


class CompletionThreads:
    """Waits for operations and notifies each operation when it ends.

    The two threads start with the first operation and live as long as the process.
    """

    def __init__(self) -> None:
        self._pending: deque[PendingOperation] = deque()
        self._changed = threading.Condition()
        self._started = False

    def add(self, item: PendingOperation) -> None:
        """Adds an operation; returns immediately."""
        with self._changed:
            self._pending.append(item)
            # With one operation the first thread has work, with two the second one.
            # Neither thread sleeps on the condition while there are more operations.
            if len(self._pending) <= 2:
                self._changed.notify_all()
            if not self._started:
                self._started = True
                for work in (self._wait_for_oldest, self._poll_others):
                    name = f"ringjax-tensorflow{work.__name__}"
                    threading.Thread(target=work, name=name, daemon=True).start()

    def _wait_for_oldest(self) -> None:
        while True:
            with self._changed:
                while not self._pending:
                    self._changed.wait()
                first = self._pending[0]
            first.wait_for_end()
            ended = []
            with self._changed:
                while self._pending and self._pending[0].done():
                    ended.append(self._pending.popleft())
            for item in ended:
                _notify(item)

    def _poll_others(self) -> None:
        while True:
            with self._changed:
                while len(self._pending) < 2:
                    self._changed.wait()
            time.sleep(_POLL_INTERVAL)
            with self._changed:
                # `_wait_for_oldest` waits for the first operation, so leave it out
                # here.
                ended = [item for item in list(self._pending)[1:] if item.done()]
                for item in ended:
                    self._pending.remove(item)
            for item in ended:
                _notify(item)


def _notify(item: PendingOperation) -> None:
    try:
        item.wait_for_end()
        item.notify()
    except Exception as error:  # the thread must continue after a failed notification
        cause = f"{type(error).__name__}: {error}"
        stderr.line(f"[ringjax] error: a graph of TensorFlow waits for ever: {cause}")
