"""Acceptor: listening sockets that hand over only connections which authenticate.

Used inside a loop over a selector, by the servers of a job (server.py), the listener of
a rank (listener.py) and ringrun. The messages are in handshake.py.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringjax.control.handshake import (
    BUSY,
    HANDSHAKE_TIMEOUT,
    MAC_BYTES,
    HandshakeRequest,
    HandshakeSteps,
)
from ringjax.control.sealed_messages import SessionKeys
from ringjax.control.unix_peer import peer_uid
from ringjax.errors import AuthenticationError

MAX_PENDING = 1024  # connections in a handshake at once; then some give way


def run_once(
    selector: selectors.BaseSelector,
    seconds: float,
    on_error: Callable[[Any, Exception], None],
) -> None:
    """One round of a loop whose selector holds callables as data.

    What one of them raises is told to `fault`, with what it was called for, and does
    not keep the others from their turns.
    """
    for key, _ in selector.select(seconds):
        # An earlier callable may have closed this one, and its number may be in use
        # again for another socket.
        now = selector.get_map().get(key.fd)
        if now is not None and now.fileobj is key.fileobj:
            try:
                now.data(key.fileobj)
            except Exception as error:
                on_error(key.fileobj, error)


class PendingConnection:
    """A connection in its handshake."""

    def __init__(self, sock: socket.socket, where: str, steps: HandshakeSteps) -> None:
        self.sock, self.where, self.steps = sock, where, steps
        self.deadline = time.monotonic() + HANDSHAKE_TIMEOUT
        self.received = b""
        self.messages = 0  # messages; with the first one it has named this job
        self.expected = next(steps)[1]


class Acceptor:
    """Listening sockets that let in only connections that prove themselves.

    It works inside a loop over `selector`, whose entries carry a callable as data, and
    which calls `expire` about once a second while there `has_pending`. A stranger costs
    at most one of MAX_PENDING places for HANDSHAKE_TIMEOUT seconds. When all
    are taken the oldest one gives way that has not named this job, which ranks do at
    once; only if there is none, the oldest rank, and it is told to come again.

    Args:
        steps: starts a callee's half of a handshake, see `answer`, for a socket.
        admit: takes the socket (not blocking) of whoever proved itself.
        log: takes a sentence about a refusal, at most one a minute for an address.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        selector: selectors.BaseSelector,
        steps: Callable[[socket.socket], HandshakeSteps],
        admit: Callable[[socket.socket, str, HandshakeRequest, SessionKeys], None],
        log: Callable[[str], None],
    ) -> None:
        self._listeners, self._selector = list(listeners), selector
        self._steps, self._admit, self._log = steps, admit, log
        self._pending: dict[socket.socket, PendingConnection] = {}
        # Most of the descriptors are not for strangers.
        self._max_pending = max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._logged: dict[str, float] = {}  # address -> when it was logged
        for listener in self._listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def has_pending(self) -> bool:
        """Whether somebody is in a handshake, so that `sweep` matters."""
        return bool(self._pending)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        sock.setblocking(False)
        where = address[0] if isinstance(address, tuple) else "this host"
        if why := _foreign_user(sock):
            sock.close()
            self._log_refusal(where, why)
            return
        if len(self._pending) >= min(MAX_PENDING, self._max_pending):
            self._evict_oldest()
        self._pending[sock] = PendingConnection(sock, where, self._steps(sock))
        self._selector.register(sock, selectors.EVENT_READ, self._receive)
        self._receive(sock)  # most have said who they are already

    def _evict_oldest(self) -> None:
        connections = self._pending.values()
        silent = next(
            (pending for pending in connections if not pending.messages), None
        )
        oldest = silent or next(iter(connections))
        self._evict(oldest, "gave way to newer connections")

    def _receive(self, sock: socket.socket) -> None:
        pending = self._pending[sock]
        try:
            piece = sock.recv(pending.expected - len(pending.received))
            if not piece:
                # A caller that has seen our proof and stops there does not believe it.
                doubt = (
                    ": it has another secret" if pending.expected == MAC_BYTES else ""
                )
                raise AuthenticationError(f"left before proving itself{doubt}")
            pending.received += piece
            if len(pending.received) < pending.expected:
                return
            output, pending.expected = pending.steps.send(pending.received)
            pending.received = b""
            pending.messages += 1
            if sock.send(output) < len(output):  # a fresh socket takes 64 bytes
                raise AuthenticationError("does not read")
        except BlockingIOError:
            return
        except (AuthenticationError, OSError) as error:
            self._refuse(pending, str(error))
            return
        if not pending.expected:
            self._finish(pending)

    def _finish(self, pending: PendingConnection) -> None:
        self._remove(pending)
        try:
            pending.steps.send(b"")
        except StopIteration as finished:
            introduction, keys = finished.value
            self._admit(pending.sock, pending.where, introduction, keys)

    def on_error(self, sock: Any, error: Exception) -> None:
        """A callable of this door, or of the loop that it is in, has raised.

        The connection that it was about ends; anything else is tried again.
        """
        why = f"caused {type(error).__name__}: {error}"
        if sock in self._pending:
            self._evict(self._pending[sock], why)
        else:
            # Out of descriptors, perhaps: then the connection stays in the queue, and
            # a pause keeps this from being a busy loop.
            self._log_refusal("a caller", why)
            time.sleep(0.05)

    def expire(self) -> None:
        """Ends the handshakes that take too long."""
        now = time.monotonic()
        for pending in [g for g in self._pending.values() if g.deadline <= now]:
            self._evict(pending, f"did not prove itself within {HANDSHAKE_TIMEOUT:g} s")

    def _remove(self, pending: PendingConnection) -> None:
        del self._pending[pending.sock]
        self._selector.unregister(pending.sock)

    def _evict(self, pending: PendingConnection, why: str) -> None:
        """Ends a handshake that may be genuine, but takes too long."""
        if pending.messages == 1:  # in the place of the next proof
            with contextlib.suppress(OSError):
                pending.sock.send(BUSY)
        self._refuse(pending, why)

    def _refuse(self, pending: PendingConnection, why: str) -> None:
        self._remove(pending)
        pending.sock.close()
        self._log_refusal(pending.where, why)

    def _log_refusal(self, where: str, why: str) -> None:
        now = time.monotonic()
        if now - self._logged.get(where, -60.0) < 60.0:
            return
        if len(self._logged) >= 1024:  # many addresses: forget, do not grow
            self._logged.clear()
        self._logged[where] = now
        self._log(f"refused a connection from {where}: it {why}")

    def close(self) -> None:
        """Closes the listening sockets and everything that has not proved itself.

        The selector must be closed before: in a forked child it is shared with the
        parent, which would lose what is unregistered here.
        """
        for sock in (*self._pending, *self._listeners):
            sock.close()
        self._pending.clear()
        self._listeners.clear()


def _foreign_user(sock: socket.socket) -> str:
    """Why the process behind a local socket is refused: it belongs to another user."""
    if sock.family != socket.AF_UNIX:
        return ""
    uid = peer_uid(sock)
    return "" if uid == os.geteuid() else f"belongs to user {uid}"
