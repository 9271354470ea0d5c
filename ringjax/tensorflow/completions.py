"""Threads that wait for operations under way, so that TensorFlow's need not.

One waits for the oldest operation; what ends together with it is told together. Since
operations may end in any order, a second one looks through all of them now and then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

from ringjax import stderr

_LOOK_AFTER = 0.002  # seconds


class Awaited(Protocol):
    """What can be waited for."""

    def done(self) -> bool:
        """Whether `settle` returns at once."""

    def settle(self) -> None:
        """Waits; does not raise, whatever became of it."""

    def tell(self) -> None:
        """Called once, after `settle`, in a thread of its own."""


class Completions:
    """Settles and tells what is added, in the order in which it ends."""

    def __init__(self) -> None:
        self._pending: deque[Awaited] = deque()
        self._changed = threading.Condition()
        self._started = False

    def add(self, item: Awaited) -> None:
        """Returns at once."""
        with self._changed:
            self._pending.append(item)
            if len(self._pending) <= 2:
                self._changed.notify_all()
            if not self._started:
                self._started = True
                for work in (self._wait, self._look):
                    name = f"ringjax-tensorflow{work.__name__}"
                    threading.Thread(target=work, name=name, daemon=True).start()

    def _wait(self) -> None:
        while True:
            with self._changed:
                while not self._pending:
                    self._changed.wait()
                first = self._pending[0]
            first.settle()
            ended = []
            with self._changed:
                while self._pending and self._pending[0].done():
                    ended.append(self._pending.popleft())
            for item in ended:
                _tell(item)

    def _look(self) -> None:
        while True:
            with self._changed:
                while len(self._pending) < 2:
                    self._changed.wait()
            time.sleep(_LOOK_AFTER)
            with self._changed:
                # Not the first, which the other thread is waiting for.
                ended = [item for item in list(self._pending)[1:] if item.done()]
                for item in ended:
                    self._pending.remove(item)
            for item in ended:
                _tell(item)


def _tell(item: Awaited) -> None:
    try:
        item.settle()
        item.tell()
    except Exception as error:  # the other items are none the worse
        why = f"{type(error).__name__}: {error}"
        stderr.line(f"[ringjax] error: a graph of TensorFlow hears nothing: {why}")
