"""Strangers: clients that connect to a running job without belonging to it.

This module finds every listening socket of the job's processes, and connects to it like
a port scanner, a web crawler, a broken client or a rank of another job. Strangers do
not have the job's secret.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ringjax.control.handshake import HandshakeRequest, Purpose, authenticate
from ringjax.errors import AuthenticationError
from ringjax.monitor.sockets import connect_within
from support import leaks

Listener = tuple[str, int] | str
"""A listening socket: a TCP address, or the name or path of a unix socket."""
_LISTENS = "0A"  # TCP_LISTEN, a state in /proc/net/tcp
_ACCEPTS = "00010000"  # __SO_ACCEPTCON, a flag in /proc/net/unix


def listeners(job: str) -> list[Listener]:
    """Returns every listening socket of a test job's processes."""
    inodes = {inode for pid in leaks.processes(job) for inode in _sockets(pid)}
    found: list[Listener] = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == _LISTENS and words[9] in inodes:
            host, _, port = words[1].partition(":")
            raw = bytes.fromhex(host)[::-1]
            found.append((socket.inet_ntoa(raw), int(port, 16)))
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[3] == _ACCEPTS and words[6] in inodes:
            name = words[7]
            found.append("\0" + name[1:] if name.startswith("@") else name)
    return found


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield target[8:-1]


def descriptors(job: str) -> dict[int, int]:
    """Returns the number of open descriptors of each process of a test job."""
    return {p: len(os.listdir(f"/proc/{p}/fd")) for p in leaks.processes(job)}


def memory(job: str) -> dict[int, int]:
    """Returns the private memory in bytes of each process of a test job."""
    found = {}
    for pid in leaks.processes(job):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                found[pid] = int(line.split()[1]) << 10
    return found


def connect(listener: Listener, seconds: float = 20.0) -> socket.socket:
    """Connects to a listener.

    Raises:
        TimeoutError: if the queue of the listener is full for `seconds`.
    """
    if isinstance(listener, tuple):
        return socket.create_connection(listener, timeout=seconds)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connect_within(sock, listener, seconds)
    except BlockingIOError as error:
        sock.close()
        raise TimeoutError(
            f"the queue of {listener!r} was full for {seconds} s"
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


# -- the behaviors of strangers; each returns the socket that it keeps open, or None ---

Behavior = Callable[[Listener, str], socket.socket | None]


def _says(text: bytes, *, stays: bool) -> Behavior:
    def visit(listener: Listener, job: str) -> socket.socket | None:
        sock = connect(listener)
        with contextlib.suppress(OSError):  # the job closed the connection
            sock.sendall(text)
        if stays:
            return sock
        sock.close()
        return None

    return visit


def _half(listener: Listener, job: str) -> socket.socket | None:
    text = HandshakeRequest(job, Purpose.DATA, 1, 0).pack(bytes(32))[:40]
    return _says(text, stays=True)(listener, job)


def _with_wrong_secret(listener: Listener, job: str) -> None:
    """Behaves like a rank of another job that uses this job's address."""
    for purpose, callee in ((Purpose.RENDEZVOUS, -1), (Purpose.DATA, 0)):
        with (
            connect(listener) as sock,
            contextlib.suppress(AuthenticationError, OSError),
        ):
            authenticate(
                sock, b"w" * 32, HandshakeRequest(job, purpose, 1, callee), 2.0
            )
            raise AssertionError(f"{listener} let in a caller with another secret")


def _reflecting(listener: Listener, job: str) -> None:
    """Sends the callee's own proof back, as if it were the caller's proof."""
    with connect(listener) as sock, contextlib.suppress(OSError):
        introduction = HandshakeRequest(job, Purpose.RENDEZVOUS, 1, -1)
        sock.sendall(introduction.pack(bytes(32)))
        proof = sock.recv(64)
        sock.sendall(proof[32:])
        sock.settimeout(2.0)
        assert len(sock.recv(64)) < 32, f"{listener} believed its own proof"


BEHAVIORS: dict[str, Behavior] = {
    "garbage": _says(bytes(range(256)) * 256, stays=False),
    "http": _says(b"GET / HTTP/1.1\r\nHost: ringjax\r\n\r\n", stays=True),
    "silence": _says(b"", stays=True),
    "half a handshake": _half,
    "another secret": _with_wrong_secret,
    "reflection": _reflecting,
}


def connect_and_close(listener: Listener, connections: int) -> int:
    """Connects and closes at once, `connections` times.

    Returns:
        The number of successful connections. If the queue of a listener is full, a
        connection waits or is refused, which is not an error of the job.
    """
    reached = 0
    for _ in range(connections):
        with contextlib.suppress(OSError):
            connect(listener, 1.0).close()
            reached += 1
    return reached


def disturb(job: str, name: str, seconds: float, rate: float = 1e9) -> int:
    """Connects to every listener with all behaviors in turn, for `seconds` seconds.

    Args:
        job: the id of the test job, as for `leaks.processes`.
        name: the job's RINGJAX_JOB, which all users of the host can read.
        rate: the maximum number of connections per second.

    Returns:
        The number of connections.
    """
    start, made = time.monotonic(), 0
    addresses = listeners(job)
    with contextlib.ExitStack() as stack:
        kept: list[socket.socket] = []
        while time.monotonic() - start < seconds:
            for listener in addresses:
                for visit in BEHAVIORS.values():
                    with contextlib.suppress(ConnectionError, TimeoutError):
                        made += 1
                        if (sock := visit(listener, name)) is not None:
                            kept.append(stack.enter_context(sock))
                made += connect_and_close(listener, 10)
                time.sleep(max(0.0, made / rate - (time.monotonic() - start)))
            while len(kept) > 256:
                kept.pop(0).close()
    return made
