"""Messages between ringrun and its host agents: one JSON object per line over pipes.

Both directions are non-blocking and queued, so neither side ever waits for the other:
a terminal that is not read must not keep a Ctrl-C from arriving. No authentication of
its own: the pipes are inherited, or ssh carries them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ringjax.control.waiting import writable

Message = dict[str, Any]
_CHUNK = 1 << 16


class Channel:
    """A pair of pipe ends in a selector whose data are callbacks taking no argument."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        reader: int,
        writer: int,
        on_message: Callable[[Message], None],
        on_close: Callable[[], None],
    ) -> None:
        self._selector = selector
        self._reader = reader
        self._writer = writer
        self._on_message = on_message
        self._on_close = on_close
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()
        self._waiting = False
        self.closed = False
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        selector.register(reader, selectors.EVENT_READ, self._read)

    @property
    def pending(self) -> int:
        """Bytes queued that the other side has not taken yet."""
        return sum(map(len, self._outgoing))

    def send(self, message: Message) -> None:
        """Queue a message; what fits into the pipe leaves at once."""
        if self.closed:
            return
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self._outgoing.append(memoryview(line))
        if not self._waiting:
            self._write()

    def flush(self, limit: float) -> None:
        """Wait up to `limit` seconds until the other side has taken everything."""
        deadline = time.monotonic() + limit
        while self._outgoing and not self.closed:
            left = deadline - time.monotonic()
            if left <= 0 or not writable(self._writer, left):
                return
            self._write()

    def close(self) -> None:
        """Close both ends; the other side reads an end of file. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._outgoing.clear()
        self._selector.unregister(self._reader)
        if self._waiting:
            self._selector.unregister(self._writer)
        for descriptor in {self._reader, self._writer}:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _lost(self) -> None:
        if not self.closed:
            self.close()
            self._on_close()

    def _write(self) -> None:
        try:
            while self._outgoing:
                head = self._outgoing[0]
                written = os.write(self._writer, head[:_CHUNK])
                if written == len(head):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = head[written:]
        except BlockingIOError:
            pass
        except OSError:
            self._lost()
            return
        if self._waiting != bool(self._outgoing):
            self._waiting = not self._waiting
            if self._waiting:
                self._selector.register(
                    self._writer, selectors.EVENT_WRITE, self._write
                )
            else:
                self._selector.unregister(self._writer)

    def _read(self) -> None:
        try:
            data = os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        start = len(self._incoming)  # earlier bytes hold no line end
        self._incoming += data
        end = self._incoming.find(b"\n", start)
        done = 0
        while end >= 0:
            line = bytes(self._incoming[done:end])
            done = end + 1
            end = self._incoming.find(b"\n", done)
            self._deliver(line)
            if self.closed:
                return
        del self._incoming[:done]

    def _deliver(self, line: bytes) -> None:
        # A login shell may greet us on its standard output before the agent speaks.
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(message, dict):
            self._on_message(message)


def standard_streams() -> tuple[int, int]:
    """Where ringrun is read and written: standard input and output, moved away.

    What the process or a library prints must not get between the messages.
    """
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return reader, writer
