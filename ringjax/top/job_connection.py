"""A connection with the ringrun of a running job: what it tells, message by message."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringjax.control.polling import wait_readable
from ringjax.monitor import sockets
from ringjax.monitor.view import View, view_from_message

_LONGEST = 1 << 26  # bytes of a message
_CHUNK = 1 << 16


class JobEnded(Exception):
    """ringrun has closed the connection: the job is over."""


@dataclass(slots=True)
class JobStatus:
    """What ringrun tells about its job.

    Attributes:
        seconds: since it began.
        events: seconds ago, and what has happened; the latest last.
    """

    view: View
    pid: int = 0
    command: str = ""
    elastic: bool = False
    seconds: float = 0.0
    joins: int = 0
    losses: int = 0
    events: list[tuple[float, str]] = field(default_factory=list)


def status(text: bytes) -> JobStatus:
    """From one message.

    Raises:
        ValueError: it is none of a ringrun that this one understands.

    Example:
        >>> status(b'{"view": {"seconds": 1.0}, "job": {"pid": 7}}').pid
        7
    """
    try:
        message = json.loads(text)
        job: dict[str, Any] = message.get("job", {})
        return JobStatus(
            view_from_message(message["view"]),
            int(job.get("pid", 0)),
            str(job.get("command", "")),
            bool(job.get("elastic", False)),
            float(job.get("seconds", 0.0)),
            int(job.get("joins", 0)),
            int(job.get("losses", 0)),
            [(float(ago), str(what)) for ago, what in message.get("events", [])],
        )
    except (AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"no message of ringrun's: {error!r}") from None


class JobConnection:
    """A job that is looked at.

    Args:
        path: ringrun's socket.

    Raises:
        JobSocketError: it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._sock: socket.socket = sockets.connect(path)
        with contextlib.suppress(OSError):  # then there is nothing to read either
            self._sock.sendall(sockets.HELLO)
        self._input = b""

    def fileno(self) -> int:
        """Of the socket: there is something to read."""
        return self._sock.fileno()

    def read(self, limit: float = math.inf) -> JobStatus | None:
        """The newest message; None if there is none within `limit` seconds.

        Raises:
            JobEnded: there will be none any more.
            ValueError: it cannot be understood.
        """
        deadline = time.monotonic() + limit
        while True:
            left = deadline - time.monotonic()
            if not wait_readable(self, None if math.isinf(left) else max(0.0, left)):
                return None
            try:
                data = self._sock.recv(_CHUNK)
            except ConnectionResetError:
                data = b""
            if not data:
                raise JobEnded
            self._input += data
            *lines, self._input = self._input.split(b"\n")
            if len(self._input) > _LONGEST:
                raise ValueError("a message without an end")
            if lines:
                return status(lines[-1])

    def close(self) -> None:
        """Leaves the job alone."""
        self._sock.close()
