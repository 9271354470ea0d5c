"""PipeWriter: queues bytes for a pipe or a socket, and never blocks."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from ringjax.control.polling import wait_writable

_CHUNK = 1 << 20


class Writer(ABC):
    """A queue of bytes that a peer has not accepted yet.

    Attributes:
        waiting: whether queued bytes wait until the peer accepts more.
    """

    def __init__(self) -> None:
        self.queue: deque[memoryview] = deque()
        self.waiting = False

    @property
    def pending(self) -> int:
        return sum(map(len, self.queue))

    def add(self, data: bytes | memoryview) -> None:
        """Queues bytes, and writes immediately as much as the peer accepts."""
        self.queue.append(memoryview(data))
        if not self.waiting:
            self.write()

    @abstractmethod
    def write(self) -> None:
        """Writes as much of the queue as the peer accepts."""

    @abstractmethod
    def flush(self, limit: float) -> None:
        """Waits up to `limit` seconds until the queue is written."""

    @abstractmethod
    def close(self) -> None:
        """Closes this end, so that the peer reads an end of file."""


class PipeWriter(Writer):
    """Writes to a descriptor when the owner of the selector calls `dispatch`.

    Args:
        on_lost: called if the peer has closed its end. on_written: called with the
        number of bytes of each write.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        descriptor: int,
        on_lost: Callable[[], None],
        on_written: Callable[[int], None] = lambda count: None,
    ) -> None:
        super().__init__()
        self._selector, self._descriptor = selector, descriptor
        self._on_lost, self._on_written = on_lost, on_written
        os.set_blocking(descriptor, False)

    def write(self) -> None:
        try:
            while self.queue:
                head = self.queue[0]
                written = os.write(self._descriptor, head[:_CHUNK])
                if written == len(head):
                    self.queue.popleft()
                else:
                    self.queue[0] = head[written:]
                self._on_written(written)
        except BlockingIOError:
            pass
        except OSError:
            self._on_lost()
            return
        if self.waiting != bool(self.queue):
            self.waiting = not self.waiting
            if self.waiting:
                self._selector.register(
                    self._descriptor, selectors.EVENT_WRITE, self.write
                )
            else:
                self._selector.unregister(self._descriptor)

    def flush(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        while self.queue:
            left = deadline - time.monotonic()
            if left <= 0 or not wait_writable(self._descriptor, left):
                return
            self.write()

    def close(self) -> None:
        self.queue.clear()
        if self.waiting:
            self._selector.unregister(self._descriptor)
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
