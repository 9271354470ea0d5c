"""Messages between ringrun and its agents: lines over pipes, each a JSON object.

Both directions are non-blocking and queued, so neither side ever waits for the other
side. A Ctrl-C must arrive even if the terminal is not read. Pipes need no
authentication of their own, because they are inherited or ssh carries them. On the
socket of an agent that has joined by itself, messages are sealed with the keys of its
handshake.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ringjax.control.polling import wait_writable
from ringjax.errors import AuthenticationError
from ringjax.run import environ

if TYPE_CHECKING:
    from ringjax.control.sealed_messages import SessionKeys

Message = dict[str, Any]  # a JSON object
_CHUNK = 1 << 20
_PIPE_SIZE = 1 << 20  # bytes of the buffer of a pipe


class _LineCodec:
    """Converts messages to lines and back. Skips lines that are not a message.

    A login shell may print a greeting to its standard output before the agent starts.
    """

    def __init__(self) -> None:
        self._incoming = bytearray()

    def seal(self, message: Message) -> bytes:
        return json.dumps(message, separators=(",", ":")).encode() + b"\n"

    def feed(self, piece: bytes) -> list[Message]:
        # Earlier bytes contain no end of a line, so search from here.
        start = len(self._incoming)
        self._incoming += piece
        end = self._incoming.rfind(b"\n", start) + 1
        lines = bytes(self._incoming[:end]).splitlines()
        del self._incoming[:end]
        return [found for line in lines if (found := self._parse(line)) is not None]

    @staticmethod
    def _parse(line: bytes) -> Message | None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None


def dispatch(
    selector: selectors.BaseSelector,
    events: Iterable[tuple[selectors.SelectorKey, int]],
) -> None:
    """Calls the callbacks of ready descriptors, which are the data of their keys."""
    for key, _ in events:
        # An earlier callback may have closed the descriptor, or registered another one
        # with the same number.
        if selector.get_map().get(key.fd) is key:
            key.data()


class Channel:
    """A pair of descriptors in a selector, whose keys have callbacks as their data.

    Args:
        reader, writer: two pipes, or twice the same socket.
        on_message: called with each message.
        on_close: called when the other side has closed its end.
        keys: the keys of the handshake on the socket; None for pipes.
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
        self._waiting = False  # whether the selector watches `writer` for room
        self.closed = False
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        for end in (reader, writer):
            # The call fails on a socket, and if this user has too many large pipes
            # already.
            with contextlib.suppress(OSError):
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        selector.register(reader, selectors.EVENT_READ, self._read)

    @property
    def pending(self) -> int:
        """The bytes in the queue that the other side has not read yet."""
        return sum(map(len, self._outgoing))

    def end_greeting(self) -> None:
        """Ends a line that a login script may have left unfinished.

        Otherwise the other side would read the greeting and the first message as one
        line, and skip it.
        """
        self._outgoing.append(memoryview(b"\n"))
        self._write()

    def send(self, message: Message) -> None:
        """Queues a message, and writes as much as the pipe takes immediately."""
        if self.closed:
            return
        self._outgoing.append(memoryview(self._sealer.seal(message)))
        if not self._waiting:
            self._write()

    def flush(self, limit: float) -> None:
        """Waits up to `limit` seconds until the other side has read everything."""
        deadline = time.monotonic() + limit
        while self._outgoing and not self.closed:
            left = deadline - time.monotonic()
            if left <= 0 or not wait_writable(self._writer, left):
                return
            self._write()

    def close(self) -> None:
        """Closes both descriptors, so that the other side reads an end of file."""
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
            if self.closed:  # the callback may have closed the channel
                return


def open_process(
    argv: Sequence[str],
    inherited: Sequence[int],
    selector: selectors.BaseSelector,
    on_message: Callable[[Message], None],
    on_close: Callable[[], None],
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Starts a program of ringjax; returns it and a channel to its standard streams.

    Args:
        inherited: descriptors of this process that the program inherits.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environ.inherited(), "PYTHONPATH": environ.agent_path()},
        pass_fds=inherited,
        start_new_session=True,  # only ringrun must get Ctrl-C from the terminal
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        reader, writer = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
    return process, Channel(selector, reader, writer, on_message, on_close)


def standard_streams() -> tuple[int, int]:
    """Moves standard input and output to other descriptors, and returns these.

    Standard input becomes /dev/null and standard output becomes standard error, so that
    a library that prints something does not write between the messages.
    """
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return reader, writer
