"""Channel between ringrun and an agent: JSON objects, one in each line.

A channel queues messages and never blocks, so ringrun reacts to Ctrl-C even if an agent
does not read. Most channels are two pipes, which need no authentication, because they
are inherited or tunneled by ssh. An agent of `ringrun --join` has a socket, on which
messages are sealed with the keys of the handshake (control/sealed_messages.py). The
agent of a host behind another host has a channel in a channel (relayed_channel.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ringjax.errors import AuthenticationError
from ringjax.run import environ
from ringjax.run.hosts.pipe_writer import PipeWriter, Writer

if TYPE_CHECKING:
    from ringjax.control.sealed_messages import SessionKeys

Message = dict[str, Any]  # a JSON object
_CHUNK = 1 << 20
_PIPE_SIZE = 1 << 20  # bytes of the buffer of a pipe


class _LineCodec:
    """Converts messages to lines, and lines to messages. Ignores all other lines.

    A login shell may print a greeting before the agent starts.
    """

    def __init__(self) -> None:
        self._incoming = bytearray()

    def seal(self, message: Message) -> bytes:
        return json.dumps(message, separators=(",", ":")).encode() + b"\n"

    def feed(self, piece: bytes) -> list[Message]:
        # The bytes received before contain no newline, so search only in `piece`.
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
    """Calls the callback of each ready descriptor: the `data` of its selector key."""
    for key, _ in events:
        # An earlier callback may have closed this descriptor, and another file may have
        # been registered under the same descriptor.
        if selector.get_map().get(key.fd) is key:
            key.data()


class Channel:
    """Sends and receives messages. Subclasses have the transport of the bytes."""

    def __init__(
        self,
        writer: Writer,
        on_message: Callable[[Message], None],
        keys: SessionKeys | None = None,
    ) -> None:
        self._writer = writer
        self._on_message = on_message
        lines = _LineCodec()
        self._sealer = lines if keys is None else keys.sealer()
        self._opener = lines if keys is None else keys.opener()
        self.closed = False

    @property
    def pending(self) -> int:
        """How many bytes wait to be sent, because the peer does not read."""
        return self._writer.pending

    def end_greeting(self) -> None:
        """Ends a line that a login script may have left unfinished.

        Otherwise the peer would read one line that consists of the end of the greeting
        and the first message, and would ignore it.
        """
        self._writer.add(b"\n")

    def send(self, message: Message) -> None:
        """Queues a message, and writes immediately as much as the peer accepts."""
        if not self.closed:
            self._writer.add(self._sealer.seal(message))

    def resend(self, other: Channel) -> None:
        """Sends all that `other` has queued. `other` must have sent nothing."""
        for data in other._writer.queue:
            self._writer.add(data)

    def flush(self, limit: float) -> None:
        """Waits up to `limit` seconds until all queued messages are written."""
        if not self.closed:
            self._writer.flush(limit)

    def close(self) -> None:
        """Closes this end, so that the peer reads an end of file."""
        if not self.closed:
            self.closed = True
            self._writer.close()

    def _deliver(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._on_message(message)
            if self.closed:  # the callback may have closed the channel
                return


class PipeChannel(Channel):
    """A channel over two pipes, or over two descriptors of one socket with `keys`.

    The owner of the selector calls `dispatch`. The channel calls `on_message` with each
    message, and calls `on_close` when the peer has closed its end.
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
        super().__init__(PipeWriter(selector, writer, self._lost), on_message, keys)
        self._selector = selector
        self._reader = reader
        self._on_close = on_close
        os.set_blocking(reader, False)
        for end in (reader, writer):
            # This call fails on sockets, and if this user has too many large pipes.
            with contextlib.suppress(OSError):
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        selector.register(reader, selectors.EVENT_READ, self._read)

    def close(self) -> None:
        if not self.closed:
            self._selector.unregister(self._reader)
            with contextlib.suppress(OSError):
                os.close(self._reader)
        super().close()

    def _lost(self) -> None:
        if not self.closed:
            self.close()
            self._on_close()

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
        self._deliver(messages)


def open_process(
    argv: Sequence[str],
    inherited: Sequence[int],
    selector: selectors.BaseSelector,
    on_message: Callable[[Message], None],
    on_close: Callable[[], None],
) -> tuple[subprocess.Popen[bytes], PipeChannel]:
    """Starts a program of ringjax. Returns it, and a channel to its standard streams.

    Args:
        inherited: file descriptors of this process that the program inherits.
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
    return process, PipeChannel(selector, reader, writer, on_message, on_close)


def standard_streams() -> tuple[int, int]:
    """Moves standard input and output to new descriptors, and returns these two.

    Standard input becomes /dev/null and standard output becomes standard error, so that
    a library that prints does not write between the messages.
    """
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return reader, writer
