"""Receives the status of a running job from the ringrun of the job."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from ringjax.control.polling import wait_readable
from ringjax.monitor import sockets
from ringjax.monitor.view import View, view_from_message

_MAX_MESSAGE = 1 << 26  # most bytes of a message
_CHUNK = 1 << 16


class JobEnded(Exception):
    """Error: ringrun has closed the connection, because the job is over."""


@dataclass(slots=True)
class JobStatus:
    """The status of a job.

    Attributes:
        pid: the process id of ringrun.
        command: the command that the ranks run.
        seconds: the time in seconds since the job began.
        joins: number of workers that have joined after the start.
        losses: number of members that were lost.
        spares: triples (worker, host, whether it is ready) of processes that wait until
            a rank is lost.
        events: the age in seconds and the text of each event. The latest event is last.
        shares: shares of the job's time by part; see `monitor.job_time.JobTime`.
    """

    view: View
    pid: int = 0
    command: str = ""
    elastic: bool = False
    seconds: float = 0.0
    joins: int = 0
    losses: int = 0
    events: list[tuple[float, str]] = field(default_factory=list)
    spares: list[tuple[int, str, bool]] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)


def parse_status(text: bytes) -> JobStatus:
    """Parses a message of ringrun. Raises ValueError if the message is not valid.

    Example:
        >>> parse_status(b'{"view": {"seconds": 1.0}, "job": {"pid": 7}}').pid
        7
    """
    try:
        message = json.loads(text)
        job = message.get("job", {})
        return JobStatus(
            view_from_message(message["view"]),
            int(job.get("pid", 0)),
            str(job.get("command", "")),
            bool(job.get("elastic", False)),
            float(job.get("seconds", 0.0)),
            int(job.get("joins", 0)),
            int(job.get("losses", 0)),
            [(float(ago), str(what)) for ago, what in message.get("events", [])],
            [(int(w), str(host), bool(r)) for w, host, r in job.get("spares", [])],
            _parse_shares(message.get("time", {})),
        )
    except (AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"no message of ringrun's: {error!r}") from None


def _parse_shares(given: dict[str, float]) -> dict[str, float]:
    shares = {str(part): float(share) for part, share in given.items()}
    if not all(0 <= share <= 1 for share in shares.values()):
        raise ValueError(f"no shares: {shares!r:.80}")
    return shares


class JobConnection:
    """A connection to the ringrun that listens on the unix socket `path`.

    Raises:
        JobSocketError: no process of this user listens at `path`.
    """

    def __init__(self, path: Path) -> None:
        self._sock: socket.socket = sockets.connect(path)
        # If ringrun has closed the connection already, `read` raises `JobEnded`.
        with contextlib.suppress(OSError):
            self._sock.sendall(sockets.HELLO)
        self._input = b""

    def fileno(self) -> int:
        """Returns the descriptor that is readable when a message arrives."""
        return self._sock.fileno()

    def read(self, limit: float = math.inf) -> JobStatus | None:
        """Returns the newest status, or None if none arrives within `limit` seconds.

        Raises:
            JobEnded: the job is over.
            ValueError: a message is not valid.
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
            if len(self._input) > _MAX_MESSAGE:
                raise ValueError("a message without an end")
            if lines:
                return parse_status(lines[-1])

    def close(self) -> None:
        self._sock.close()
