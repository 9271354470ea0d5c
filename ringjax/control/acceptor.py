"""Listening sockets that pass on only connections that have authenticated.

An acceptor works inside an event loop over a selector. The servers of a job
(server.py), the listener of a rank (listener.py) and `ringrun --listen` use acceptors.
handshake.py defines the messages.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Sequence

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

MAX_PENDING = 1024  # connections in a handshake at the same time
_LOG_INTERVAL = 60.0  # seconds between two log lines about one address
_MAX_LOGGED = 1024  # addresses to remember, so that a port scan cannot exhaust memory

# Receives an authenticated connection: its nonblocking socket, the address of the
# caller, the request of the handshake, and the keys of the session.
Admit = Callable[[socket.socket, str, HandshakeRequest, SessionKeys], None]


def run_once(
    selector: selectors.BaseSelector,
    seconds: float,
    on_error: Callable[[object, Exception], None],
) -> None:
    """Runs one round of an event loop, and waits up to `seconds` for an event.

    The data of each selector entry is a callable, which is called with the socket. If a
    callable raises an exception, `on_error` is called with the socket and the
    exception, and the other callables of this round still run.
    """
    for key, _ in selector.select(seconds):
        # An earlier callable of this round may have closed this socket, and a new
        # socket may have the same descriptor. Look the entry up again.
        entry = selector.get_map().get(key.fd)
        if entry is not None and entry.fileobj is key.fileobj:
            try:
                entry.data(key.fileobj)
            except Exception as error:
                on_error(key.fileobj, error)


class PendingConnection:
    """A connection whose handshake is running."""

    def __init__(self, sock: socket.socket, where: str, steps: HandshakeSteps) -> None:
        self.sock, self.where, self.steps = sock, where, steps
        self.deadline = time.monotonic() + HANDSHAKE_TIMEOUT
        self.received = b""
        self.messages = 0  # messages received; the first message names this job
        self.expected = next(steps)[1]  # the size of the next message in bytes


class Acceptor:
    """Listening sockets that admit only connections that authenticate.

    The event loop calls `expire` about once a second while `has_pending` is true.

    An attacker needs less than 100 bytes to occupy one of MAX_PENDING handshakes for
    HANDSHAKE_TIMEOUT seconds. At this limit, the acceptor evicts the oldest connection
    that has not named this job yet, because ranks name the job immediately. If all
    connections have named the job, the oldest is evicted, and may connect again.

    Args:
        listeners: listening sockets, which the acceptor closes.
        selector: the selector of the event loop; the data of its entries are callables,
            see `run_once`.
        steps: starts the callee's end of a handshake on a socket, see `callee_steps`.
        log: called with a sentence about a refusal, at most once a minute per address.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        selector: selectors.BaseSelector,
        steps: Callable[[socket.socket], HandshakeSteps],
        admit: Admit,
        log: Callable[[str], None],
    ) -> None:
        self._listeners, self._selector = list(listeners), selector
        self._steps, self._admit, self._log = steps, admit, log
        self._pending: dict[socket.socket, PendingConnection] = {}
        # Leave three quarters of the descriptors to authenticated connections.
        quarter = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        self._max_pending = max(64, quarter)
        self._logged: dict[str, float] = {}  # address -> when a refusal was logged
        for listener in self._listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def has_pending(self) -> bool:
        """Whether a handshake is running, so that the event loop must call `expire`."""
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
        self._receive(sock)  # most callers have sent their request already

    def _evict_oldest(self) -> None:
        connections = self._pending.values()  # the oldest first
        silent = next((each for each in connections if not each.messages), None)
        self._evict(silent or next(iter(connections)), "gave way to newer connections")

    def _receive(self, sock: socket.socket) -> None:
        pending = self._pending[sock]
        try:
            piece = sock.recv(pending.expected - len(pending.received))
            if not piece:
                # A caller with another secret cannot verify the HMAC of this end, and
                # closes the connection instead of sending its own HMAC.
                unproven = pending.expected == MAC_BYTES
                why = ": it has another secret" if unproven else ""
                raise AuthenticationError(f"left before proving itself{why}")
            pending.received += piece
            if len(pending.received) < pending.expected:
                return
            output, pending.expected = pending.steps.send(pending.received)
            pending.received = b""
            pending.messages += 1
            # The send buffer of a new socket is larger than a message of the handshake.
            if sock.send(output) < len(output):
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
            request, keys = finished.value
            self._admit(pending.sock, pending.where, request, keys)

    def on_error(self, sock: object, error: Exception) -> None:
        """Handles an exception in the event loop.

        Closes the connection of `sock` if its handshake is still running.
        """
        why = f"caused {type(error).__name__}: {error}"
        if isinstance(sock, socket.socket) and sock in self._pending:
            self._evict(self._pending[sock], why)
        else:
            # `accept` fails if no descriptor is free. The new connection then stays in
            # the kernel's queue, and the listener stays readable. Without a pause the
            # event loop would use a whole core.
            self._log_refusal("a caller", why)
            time.sleep(0.05)

    def expire(self) -> None:
        """Ends the handshakes that have taken too long."""
        now = time.monotonic()
        for pending in [p for p in self._pending.values() if p.deadline <= now]:
            self._evict(pending, f"did not prove itself within {HANDSHAKE_TIMEOUT:g} s")

    def _remove(self, pending: PendingConnection) -> None:
        del self._pending[pending.sock]
        self._selector.unregister(pending.sock)

    def _evict(self, pending: PendingConnection, why: str) -> None:
        """Ends a handshake, perhaps of a genuine caller, which may connect again."""
        if pending.messages == 1:  # the caller waits for a reply, which BUSY replaces
            with contextlib.suppress(OSError):
                pending.sock.send(BUSY)
        self._refuse(pending, why)

    def _refuse(self, pending: PendingConnection, why: str) -> None:
        self._remove(pending)
        pending.sock.close()
        self._log_refusal(pending.where, why)

    def _log_refusal(self, where: str, why: str) -> None:
        now = time.monotonic()
        if now - self._logged.get(where, -_LOG_INTERVAL) < _LOG_INTERVAL:
            return
        if len(self._logged) >= _MAX_LOGGED:
            self._logged.clear()
        self._logged[where] = now
        self._log(f"refused a connection from {where}: it {why}")

    def close(self) -> None:
        """Closes the listening sockets and the pending connections.

        Close the selector first. A forked child shares the selector with its parent: if
        the child unregistered a socket, the parent's selector would lose the socket.
        """
        for sock in (*self._pending, *self._listeners):
            sock.close()
        self._pending.clear()
        self._listeners.clear()


def _foreign_user(sock: socket.socket) -> str:
    """Returns why a unix socket's peer is refused, or "" if this user owns the peer."""
    if sock.family != socket.AF_UNIX:
        return ""
    uid = peer_uid(sock)
    return "" if uid == os.geteuid() else f"belongs to user {uid}"
