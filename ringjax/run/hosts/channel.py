"""Messages between ringrun and its host agents: JSON objects, a line each over pipes.

Both directions are non-blocking and queued, so neither side ever waits for the other:
a terminal that is not read must not keep a Ctrl-C from arriving. No authentication of
its own: the pipes are inherited, or ssh carries them; and over the socket of an agent
that has dialled in, the messages are sealed with the keys of its handshake.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringjax.control.polling import wait_writable
from ringjax.errors import AuthenticationError

if TYPE_CHECKING:
    from ringjax.control.sealed_messages import SessionKeys

Message = dict[str, Any]
_CHUNK = 1 << 20
_PIPE = 1 << 20  # bytes that a pipe between two processes of ours may hold


class _LineCodec:
    """A message is a line; what is none is left out.

    A login shell may greet us on its standard output before the agent speaks.
    """

    def __init__(self) -> None:
        self._incoming = bytearray()

    def seal(self, message: Message) -> bytes:
        return json.dumps(message, separators=(",", ":")).encode() + b"\n"

    def feed(self, piece: bytes) -> list[Message]:
        start = len(self._incoming)  # earlier bytes hold no line end
        self._incoming += piece
        end = self._incoming.rfind(b"\n", start) + 1
        lines = bytes(self._incoming[:end]).splitlines()
        del self._incoming[:end]
        return [found for line in lines if (found := self._read(line)) is not None]

    @staticmethod
    def _read(line: bytes) -> Message | None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None


class Channel:
    """A pair of descriptors in a selector whose data are callbacks without arguments.

    Args:
        keys: of the handshake on the socket that both are; None: they are pipes.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        reader: int,
        writer: int,
        on_message: Callable[[Message], None],
        on_close: Callable[[], None],
        keys: SessionKeys | None = None,
    ) -> None:
        self._selector = selector
        self._reader = reader
        self._writer = writer
        self._on_message = on_message
        self._on_close = on_close
        lines = _LineCodec()
        self._sealer = lines if keys is None else keys.sealer()
        self._opener = lines if keys is None else keys.opener()
        self._outgoing: deque[memoryview] = deque()
        self._waiting = False
        self.closed = False
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        for end in (reader, writer):
            with contextlib.suppress(OSError):  # a socket, or too many large pipes
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE)
        selector.register(reader, selectors.EVENT_READ, self._read)

    @property
    def pending(self) -> int:
        """Bytes queued that the other side has not taken yet."""
        return sum(map(len, self._outgoing))

    def end_greeting(self) -> None:
        """Ends what a login script has written before the first message.

        Without an end of its line it would be taken for the beginning of the message.
        """
        self._outgoing.append(memoryview(b"\n"))
        self._write()

    def send(self, message: Message) -> None:
        """Queue a message; what fits into the pipe leaves at once."""
        if self.closed:
            return
        self._outgoing.append(memoryview(self._sealer.seal(message)))
        if not self._waiting:
            self._write()

    def flush(self, limit: float) -> None:
        """Wait up to `limit` seconds until the other side has taken everything."""
        deadline = time.monotonic() + limit
        while self._outgoing and not self.closed:
            left = deadline - time.monotonic()
            if left <= 0 or not wait_writable(self._writer, left):
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
        try:
            messages = self._opener.feed(data)
        except AuthenticationError:
            self._lost()
            return
        for message in messages:
            self._on_message(message)
            if self.closed:
                return


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
